"""The canary before the first batch, asking fake servers that are wrong in one thing each."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from draftfleet.errors import BadRequest, Mismatch, Overload, Transient, Unauthorized
from draftfleet.records import Prompt
from draftfleet.settings import Sampling, Variant
from draftfleet.testing import FakeServer
from draftfleet.tokens import TargetTokenizer, load
from workers import canary, dialects
from workers.canary import CanaryReport

TINY_TARGET = Path(__file__).parents[2] / "examples/tiny-target"
PROMPT = Prompt(prompt_id="0" * 32, split="train", messages=[{"role": "user", "content": "What is 3 + 4?"}])
THINKING = Sampling(max_tokens=256, thinking=True)


@pytest.fixture(scope="module")
def tokenizer() -> TargetTokenizer:
    return load(TINY_TARGET)


def check(server: FakeServer, **changes: Any) -> CanaryReport:
    """What a worker does: look at the server, then let the canary ask."""

    async def run() -> CanaryReport:
        async with aiohttp.ClientSession() as session:

            async def post(path: str, body: dict[str, Any]) -> tuple[int, Mapping[str, str], bytes]:
                async with session.post(server.url + path, json=body) as response:
                    return response.status, dict(response.headers), await response.read()

            async with session.get(server.url + "/v1/models") as response:
                models, headers = await response.json(), dict(response.headers)
            name = changes.pop("dialect", None) or dialects.detect(models, "", headers)
            assert name is not None
            wanted = {"model": "tiny", "sampling": THINKING, "prompt": PROMPT, "tokenizer": None}
            wanted |= {"request_timeout_s": 1800.0, **changes}
            return await canary.check(
                post,
                server="http://node:8000",
                dialect=dialects.load(name) if isinstance(name, str) else name,
                models=models,
                **wanted,
            )

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("shape", "dialect"),
    [
        *[(name, name) for name in ("vllm", "sglang", "llamacpp", "transformers", "openai")],
        ("vllm-0.10", "vllm"),
        ("sglang", "sglang-native"),
        ("llamacpp", "llamacpp-native"),
    ],
)
def test_a_sound_server_passes_without_a_word(shape: str, dialect: str, tokenizer: TargetTokenizer) -> None:
    with FakeServer(shape=shape, model="tiny", tokenizer=str(TINY_TARGET)) as server:
        report = check(server, tokenizer=tokenizer, dialect=dialect)

        assert server.stats()["requests"] == 1
    assert report.warnings == ()
    assert report.dialect == dialect
    assert report.completion.reasoning
    assert report.completion.outcome == "ok"
    assert 0 < report.seconds_per_token <= report.seconds


def test_it_asks_for_a_short_answer_since_rows_wait_for_it(tokenizer: TargetTokenizer) -> None:
    with FakeServer(model="tiny", tokenizer=str(TINY_TARGET), tokens=3000, spread=0) as server:
        report = check(server, tokenizer=tokenizer, sampling=Sampling(max_tokens=8192, thinking=True))

        assert server.stats()["requests"] == 1
    assert report.completion.outcome == "truncated"
    assert report.completion.completion_tokens == canary.TOKENS
    assert report.warnings == ()


@pytest.mark.parametrize("kind", ["cut_in_thought", "end_in_thought"])
def test_an_answer_that_ends_in_its_thought_is_sound(kind: Any, tokenizer: TargetTokenizer) -> None:
    with FakeServer(model="tiny", tokenizer=str(TINY_TARGET)) as server:
        server.fault(kind)

        report = check(server, tokenizer=tokenizer)

    assert report.warnings == ()
    assert report.completion.content is None


def test_a_server_with_another_model_is_named_with_what_it_serves() -> None:
    with (
        FakeServer(model="large") as server,
        pytest.raises(Mismatch, match="http://node:8000 serves 'large', this run asks for 'tiny'"),
    ):
        check(server)


def test_a_server_that_answers_as_another_model_than_it_lists_is_refused() -> None:
    with FakeServer(model="tiny") as server:
        server.fault("other_model")

        # It is asked for the model that it listed a moment ago.
        with pytest.raises(Mismatch, match="does not exist"):
            check(server)


def test_reasoning_in_a_field_that_nobody_reads_is_named() -> None:
    with FakeServer(model="tiny") as server:
        server.fault("rename_reasoning")

        with pytest.raises(Mismatch, match=re.escape("sends text in message.thoughts, which no dialect reads")):
            check(server)
        report = check(server, sampling=Sampling(max_tokens=256))

    assert any("message.thoughts" in warning for warning in report.warnings)


def test_no_reasoning_at_all_stops_a_run_that_thinks_and_no_other() -> None:
    with FakeServer(model="tiny") as server:
        server.fault("no_reasoning")

        with pytest.raises(Mismatch, match=re.escape("sends no reasoning, and sampling.thinking is true")):
            check(server)
        assert check(server, sampling=Sampling(max_tokens=256)).completion.reasoning is None


def test_a_model_that_thinks_only_where_it_helps_passes_with_a_warning() -> None:
    with FakeServer(model="tiny") as server:
        server.fault("no_reasoning", contains="What is 3 + 4?")
        server.fault("no_reasoning", contains="A train leaves", times=2)

        report = check(server)

    assert any("does not think each time" in warning for warning in report.warnings)


def test_reasoning_that_was_switched_off_is_warned_of() -> None:
    with FakeServer(model="tiny") as server:
        still_thinking = {"chat_template_kwargs": {"enable_thinking": True}}

        report = check(server, sampling=Sampling(max_tokens=256, thinking=False, extra_body=still_thinking))

    assert any("though sampling.thinking is false" in warning for warning in report.warnings)


def test_without_ids_and_without_a_tokenizer_nothing_could_be_trained_on(tokenizer: TargetTokenizer) -> None:
    with FakeServer(model="tiny", tokenizer=str(TINY_TARGET)) as server:
        server.fault("no_ids")

        with pytest.raises(Mismatch, match=re.escape("gives no token ids, and target.path is not set")):
            check(server)
        assert check(server, tokenizer=tokenizer).warnings == ()


def test_without_counts_nothing_could_be_checked(tokenizer: TargetTokenizer) -> None:
    with FakeServer(model="tiny", tokenizer=str(TINY_TARGET)) as server:
        server.fault("no_usage")

        with pytest.raises(Mismatch, match="does not say how many tokens it produced"):
            check(server, tokenizer=tokenizer)


def test_ids_that_are_fewer_than_the_count_are_refused() -> None:
    with FakeServer(model="tiny") as server:
        server.fault("wrong_ids")

        with pytest.raises(Mismatch, match=r"gives \d+ token ids and counts \d+ tokens"):
            check(server)


def test_without_a_target_the_tokenizer_cannot_be_compared_and_that_is_said() -> None:
    with FakeServer(model="tiny") as server:
        report = check(server)

    assert any("target.path is not set" in warning for warning in report.warnings)


@pytest.mark.parametrize("shape", ["vllm", "transformers"])
def test_a_target_with_another_tokenizer_than_the_served_model_is_refused(
    shape: str, tokenizer: TargetTokenizer
) -> None:
    # Without a tokenizer of its own, the fake's ids and counts are those of no real model.
    with (
        FakeServer(shape=shape, model="tiny") as server,
        pytest.raises(Mismatch, match=r"reads the first prompt as \d+ tokens, the tokenizer .* of target.path"),
    ):
        check(server, tokenizer=tokenizer)


def test_ids_that_do_not_spell_the_text_are_refused(tmp_path: Path, tokenizer: TargetTokenizer) -> None:
    # The same template and the same prompt ids; two words of the answer have changed places in the vocabulary.
    rules = (TINY_TARGET / "tokenizer.json").read_text()
    vocabulary: dict[str, int] = json.loads(rules)["model"]["vocab"]
    one, other = (vocabulary["Ġ" + word] for word in ("river", "garden"))
    swapped = json.loads(rules)
    swapped["model"]["vocab"] |= {"Ġriver": other, "Ġgarden": one}
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        (tmp_path / name).write_text((TINY_TARGET / name).read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps(swapped))

    with FakeServer(model="tiny", tokenizer=str(tmp_path), spread=0, tokens=200) as server:
        with pytest.raises(Mismatch, match=re.escape("do not spell its reasoning with the tokenizer of target.path")):
            check(server, tokenizer=tokenizer)
        assert check(server, tokenizer=load(tmp_path)).warnings == ()


def test_max_tokens_over_the_context_leaves_no_room() -> None:
    with FakeServer(model="tiny", max_model_len=200) as server:
        with pytest.raises(Mismatch, match="max_tokens = 256 leaves no room for a prompt in the 200 tokens"):
            check(server)
        with pytest.raises(Mismatch, match="in the 100 tokens"):
            check(server, context_tokens=100)


def test_the_smaller_of_two_known_contexts_counts() -> None:
    with FakeServer(model="tiny", max_model_len=600) as server:
        assert check(server).context_tokens == 600
        assert check(server, context_tokens=300).context_tokens == 300
        assert check(server, context_tokens=900).context_tokens == 600


def test_a_prompt_that_does_not_fit_is_that_prompts_fault(tokenizer: TargetTokenizer) -> None:
    with FakeServer(model="tiny", tokenizer=str(TINY_TARGET), max_model_len=260) as server:
        with pytest.raises(BadRequest, match=re.escape("a prompt of 16 tokens and sampling.max_tokens = 256 are more")):
            check(server, tokenizer=tokenizer)

        assert server.stats()["requests"] == 0


def test_what_the_server_refuses_is_told_apart_from_what_it_lacks() -> None:
    with FakeServer(shape="transformers", model="tiny", tokenizer=str(TINY_TARGET)) as server:
        unknown_field = Sampling(max_tokens=256, extra_body={"return_token_ids": True})

        with pytest.raises(BadRequest, match="Unexpected fields"):
            check(server, sampling=unknown_field)
        server.change(faults=[{"kind": "status", "status": 503, "retry_after": "3"}])
        with pytest.raises(Overload) as overload:
            check(server)
        server.change(faults=[{"kind": "status", "status": 401}])
        with pytest.raises(Unauthorized, match=re.escape("worker.api_key")):
            check(server)
        server.change(faults=[{"kind": "garbage"}])
        with pytest.raises(Transient, match="no JSON object"):
            check(server)

    assert overload.value.retry_after_s == 3


def test_a_timeout_that_would_cut_long_answers_is_refused_with_the_numbers() -> None:
    with FakeServer(model="tiny", seconds_per_token=0.002, spread=0) as server:
        with pytest.raises(Mismatch, match=re.escape("worker.request_timeout_s = 0.4 would cut every long answer")):
            check(server, request_timeout_s=0.4)
        assert server.stats()["requests"] == 2  # the first answer of a server may have waited for its warm-up


def test_a_timeout_that_is_near_is_warned_of() -> None:
    pace = 0.02
    with FakeServer(model="tiny", seconds_per_token=pace, tokens=100, spread=0) as server:
        report = check(server, request_timeout_s=256 * pace * 1.49)

    assert any("is near: 256 tokens" in warning for warning in report.warnings)


def test_a_slow_first_answer_does_not_refuse_a_timeout_that_is_long_enough() -> None:
    slow = 3.0
    with FakeServer(model="tiny", latency_s=slow, spread=0) as server:
        original = server.change

        async def run() -> CanaryReport:
            async with aiohttp.ClientSession() as session:

                async def post(path: str, body: dict[str, Any]) -> tuple[int, Mapping[str, str], bytes]:
                    async with session.post(server.url + path, json=body) as response:
                        answer = response.status, dict(response.headers), await response.read()
                    original(latency_s=0)  # it is warm now
                    return answer

                models = {"data": [{"id": "tiny", "owned_by": "vllm"}]}
                return await canary.check(
                    post,
                    server=server.url,
                    dialect=dialects.load("vllm"),
                    models=models,
                    model="tiny",
                    sampling=THINKING,
                    prompt=PROMPT,
                    tokenizer=None,
                    request_timeout_s=12.0,  # 256 tokens at the first answer's pace take 16 s
                )

        report = asyncio.run(run())

    assert report.seconds < slow


@pytest.mark.parametrize(("shape", "dialect"), [("sglang", "sglang-native"), ("llamacpp", "llamacpp-native")])
def test_a_server_that_is_asked_with_ids_needs_the_target(shape: str, dialect: str) -> None:
    with FakeServer(shape=shape, model="tiny") as server:
        with pytest.raises(Mismatch, match=r"asked with token ids, and target\.path is not set"):
            check(server, dialect=dialect)

        assert server.stats()["requests"] == 0


def test_a_server_that_reads_our_ids_as_more_is_another(tokenizer: TargetTokenizer) -> None:
    class Counting:
        """A dialect that counts one token more, as where a server puts a mark of its own before the prompt."""

        def __getattr__(self, name: str) -> Any:
            return getattr(dialects.load("llamacpp-native"), name)

        def parse(self, body: dict[str, Any]) -> dialects.Completion:
            return dialects.load("llamacpp-native").parse({**body, "tokens_evaluated": body["tokens_evaluated"] + 1})

    with (
        FakeServer(shape="llamacpp", model="tiny", tokenizer=str(TINY_TARGET)) as server,
        pytest.raises(Mismatch, match="reads the first prompt as"),
    ):
        check(server, tokenizer=tokenizer, dialect=Counting())


def test_a_run_that_thinks_in_a_share_of_its_rows_is_tried_both_ways() -> None:
    both = Sampling(max_tokens=256, thinking_share=0.5)
    never_off = both.model_copy(update={"extra_body": {"chat_template_kwargs": {"enable_thinking": True}}})

    with FakeServer(shape="vllm", model="tiny") as server:
        sound = check(server, sampling=both)
        num_asked = server.stats()["requests"]
        stubborn = check(server, sampling=never_off)
        server.fault("no_reasoning")
        with pytest.raises(Mismatch, match=re.escape("sends no reasoning, and sampling.thinking is true")):
            check(server, sampling=both)

    assert num_asked == 2
    assert sound.completion.reasoning
    assert not [warning for warning in sound.warnings if "reasoning" in warning]
    assert any("is false (asked with thinking = false)" in warning for warning in stubborn.warnings)


def test_a_variant_that_has_no_room_is_found_before_its_rows_are_asked() -> None:
    mixed = Sampling(max_tokens=64, mixture=[Variant(temperature=1), Variant(max_tokens=4096)])

    with FakeServer(shape="vllm", model="tiny", max_model_len=1024) as server, pytest.raises(Mismatch) as error:
        check(server, sampling=mixed)

    assert "sampling.max_tokens = 4096 leaves no room" in str(error.value)
