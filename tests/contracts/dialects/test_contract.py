"""One suite over all dialects: the same questions to a server of each kind, and the same meaning of its answers.

The servers are fake ones; that they answer as the real do is what test_recorded.py holds the dialects to.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import aiohttp
import pytest

from draftfleet.errors import BadRequest, Mismatch, Overload, Transient
from draftfleet.settings import Sampling
from draftfleet.testing import FakeServer
from draftfleet.tokens import TargetTokenizer
from workers import dialects, text_ids
from workers.dialects import Ask, Completion, Request, decode

MESSAGES: list[dict[str, Any]] = [{"role": "user", "content": "What is 3 + 4?"}]
SHAPES = {
    "vllm": ("vllm", "vllm-0.10"),
    "sglang": ("sglang",),
    "sglang-native": ("sglang",),
    "llamacpp": ("llamacpp",),
    "llamacpp-native": ("llamacpp",),
    "transformers": ("transformers",),
    "ollama": ("ollama",),
    "openai": ("openai", "vllm", "vllm-0.10", "sglang", "llamacpp", "transformers", "ollama"),
}
"""The servers that a dialect has to make do with."""
GIVE_NO_IDS = {("vllm", "vllm-0.10")}
UNDER_ANY_NAME = ("sglang", "llamacpp")
WITHOUT_LIMIT = ("transformers", "ollama")


class Server(NamedTuple):
    dialect: dialects.Dialect
    shape: str
    fake: FakeServer
    tokenizer: TargetTokenizer

    def ask(self, messages: list[dict[str, Any]] | None = None, **wanted: Any) -> Completion:
        knobs = Sampling(**{"max_tokens": 256, "thinking": True, **wanted})
        asked = messages or MESSAGES
        ids = self.tokenizer.prompt_ids(asked, template_kwargs=knobs.template_kwargs)
        asks_with_ids = self.dialect.WANTS_PROMPT_IDS
        ask = Ask(model="tiny", messages=asked, sampling=knobs, prompt_token_ids=ids if asks_with_ids else None)
        body = self.post(self.dialect.request(ask))
        return text_ids.read(self.dialect, body, self.tokenizer, ids if asks_with_ids else None)

    def post(self, request: Request) -> dict[str, Any]:
        status, headers, raw = asyncio.run(_post(self.fake.url, request))
        if status != 200:
            raise self.dialect.classify(status, headers, raw)
        return decode(raw)


async def _post(url: str, request: Request) -> tuple[int, Mapping[str, str], bytes]:
    async with aiohttp.ClientSession() as session, session.post(url + request.path, json=request.body) as response:
        return response.status, dict(response.headers), await response.read()


@pytest.fixture(params=[(name, shape) for name, shapes in SHAPES.items() for shape in shapes], ids="-on-".join)
def server(request: pytest.FixtureRequest, fake: FakeServer, tokenizer: TargetTokenizer) -> Server:
    name, shape = request.param
    fake.change(shape=shape, model="tiny", max_model_len=None, tokens=48, faults=[])
    return Server(dialects.load(name), shape, fake, tokenizer)


def test_the_suite_leaves_no_dialect_out() -> None:
    assert list(SHAPES) == list(dialects.DIALECTS)


def test_the_thought_is_found_and_is_no_part_of_the_content(server: Server) -> None:
    answer = server.ask()

    assert answer.outcome == "ok"
    assert answer.finish_reason == "stop"
    assert answer.reasoning
    assert answer.reasoning_source
    assert answer.content
    assert "think>" not in f"{answer.reasoning}{answer.content}"


def test_the_switch_for_thinking_reaches_the_template(server: Server) -> None:
    if server.shape == "ollama" and server.dialect.NAME != "ollama":
        return  # it has no switch of the template, and another dialect does not know its own

    answer = server.ask(thinking=False)

    assert answer.reasoning is None
    assert answer.content


def test_ids_are_as_many_as_the_count_and_spell_the_answer(server: Server) -> None:
    answer = server.ask()

    assert answer.prompt_tokens == len(server.tokenizer.prompt_ids(MESSAGES, thinking=True))
    if not server.dialect.GIVES_TOKEN_IDS or (server.dialect.NAME, server.shape) in GIVE_NO_IDS:
        assert answer.token_ids is None
        return
    assert answer.token_ids is not None
    assert len(answer.token_ids) == answer.completion_tokens
    assert answer.prompt_token_ids == server.tokenizer.prompt_ids(MESSAGES, thinking=True)
    spelled = server.tokenizer.decode(answer.token_ids)
    assert (answer.reasoning or "") in spelled
    assert (answer.content or "") in spelled
    assert spelled.endswith(server.tokenizer.end_of_turn)


def test_an_answer_cut_in_its_thought_is_truncated_and_all_thought(server: Server) -> None:
    answer = server.ask(max_tokens=12)

    assert answer.outcome == "truncated"
    assert answer.finish_reason == "length"
    assert answer.reasoning
    assert not answer.content
    assert answer.completion_tokens == 12


def test_an_answer_that_ends_inside_its_thought_is_whole(server: Server) -> None:
    server.fake.fault("end_in_thought")

    answer = server.ask()

    assert answer.outcome == "ok"
    assert answer.reasoning
    assert not answer.content


def test_a_prompt_over_the_context_is_refused_for_good(server: Server) -> None:
    server.fake.change(max_model_len=64)
    if server.shape in WITHOUT_LIMIT:
        assert server.ask([{"role": "user", "content": "count to ten and " * 100}], max_tokens=8).finish_reason
        return

    with pytest.raises(BadRequest, match="context") as error:
        server.ask([{"role": "user", "content": "count to ten and " * 100}], max_tokens=8)
    assert error.value.status == 400


def test_an_unknown_model_is_the_servers_fault(server: Server) -> None:
    server.fake.change(model="another")
    if server.shape in UNDER_ANY_NAME:
        assert server.ask().content
        return

    with pytest.raises(Mismatch):
        server.ask()


@pytest.mark.parametrize("status", [429, 503])
def test_an_overloaded_server_is_left_alone_for_as_long_as_it_asks(server: Server, status: int) -> None:
    server.fake.fault("status", status=status, retry_after="7")

    with pytest.raises(Overload) as error:
        server.ask()
    assert error.value.retry_after_s == 7


@pytest.mark.parametrize("kind", ["abort", "garbage"])
def test_an_answer_broken_off_on_http_200_is_asked_again(server: Server, kind: Any) -> None:
    server.fake.fault(kind)

    with pytest.raises(Transient):
        server.ask()


def test_counts_that_are_not_given_are_minus_one(server: Server) -> None:
    server.fake.fault("no_usage")

    answer = server.ask()

    assert (answer.prompt_tokens, answer.completion_tokens) == (-1, -1)


def test_a_cut_answer_is_gone_on_with_from_its_exact_ids(server: Server) -> None:
    prompt = server.tokenizer.prompt_ids(MESSAGES, thinking=True)
    knobs = Sampling(max_tokens=300, thinking=True)
    if server.dialect.continuation(Ask(model="tiny", messages=MESSAGES, sampling=knobs, prompt_token_ids=[1])) is None:
        assert not server.dialect.GIVES_TOKEN_IDS
        return
    whole = server.ask(max_tokens=300)
    cut = server.ask(max_tokens=12)
    begun = cut.token_ids or server.tokenizer.encode(f"<think>\n{cut.reasoning}")

    ask = Ask(model="tiny", messages=MESSAGES, sampling=knobs, prompt_token_ids=prompt + begun)
    request = server.dialect.continuation(replace(ask, sampling=Sampling(max_tokens=300 - len(begun))))
    assert request is not None
    rest = server.dialect.parse(server.post(request))

    assert rest.outcome == "ok"
    assert rest.prompt_tokens == len(prompt) + len(begun)
    if server.shape != "vllm-0.10":
        assert rest.token_ids is not None
        assert begun + rest.token_ids == (whole.token_ids or begun + rest.token_ids)
        assert len(rest.token_ids) == rest.completion_tokens


@pytest.mark.parametrize("template", ["thought opened", "not opened"])
def test_a_thought_that_the_prompt_opened_is_no_content(template: str, tokenizer: TargetTokenizer) -> None:
    ids = tokenizer.prompt_ids(MESSAGES) + (tokenizer.encode("<think>\n") if template == "thought opened" else [])
    cut = {"content": "The numbers are", "tokens": [1, 2, 3], "stop_type": "limit"}
    whole = {"content": "a\n</think>\n\nb", "tokens": [1, 2, 3], "stop_type": "eos"}

    of_cut, of_whole = (text_ids.read(dialects.load("llamacpp-native"), body, tokenizer, ids) for body in (cut, whole))

    is_open = template == "thought opened"
    assert (of_cut.reasoning, of_cut.content) == (("The numbers are", None) if is_open else (None, "The numbers are"))
    assert (of_whole.reasoning, of_whole.content) == ("a", "b")
