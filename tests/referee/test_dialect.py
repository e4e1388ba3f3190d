"""The dialect of vLLM against real vLLM: what is asked is what it reads, and a cut answer is gone on with id by id."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import AutoTokenizer

from draftfleet.settings import Sampling
from draftfleet.tokens import load
from workers.dialects import Ask, Completion, Request, decode, vllm

pytestmark = [pytest.mark.referee, pytest.mark.timeout(1800)]

USER: dict[str, Any] = {"role": "user", "content": "What is 3 + 4?"}
GREEDY = Sampling(max_tokens=128, temperature=0)
QUESTIONS = [f"Compute {number} + {97 - number}." for number in range(8)]


def ask(client: httpx.Client, request: Request | None) -> Completion:
    assert request is not None
    response = client.post(request.path, json=request.body)
    assert response.status_code == 200, response.text
    return vllm.parse(decode(response.content))


def test_earlier_reasoning_under_both_its_names_is_rendered_once(plain_vllm: httpx.Client, target: Path) -> None:
    messages = [USER, {"role": "assistant", "content": "The sum is 7.", "reasoning_content": "3 + 4 = 7."}]
    # The template of the tiny target shows the thought of the last message alone.
    sampling = Sampling(max_tokens=1, extra_body={"add_generation_prompt": False})
    request = vllm.request(Ask(model="tiny-target", messages=messages, sampling=sampling))

    answer = ask(plain_vllm, request)

    rendered = AutoTokenizer.from_pretrained(target).apply_chat_template(messages, tokenize=False)
    assert {"reasoning", "reasoning_content"} <= request.body["messages"][1].keys()
    assert rendered.count("3 + 4 = 7.") == 1
    assert load(target).decode(answer.prompt_token_ids or []) == rendered


def test_a_cut_answer_and_its_continuation_are_the_answer_that_was_not_cut(
    plain_vllm: httpx.Client, figure: Callable[[str, object], None]
) -> None:
    equal = 0
    for number, question in enumerate(QUESTIONS):
        whole = ask(plain_vllm, vllm.request(_asked(question, GREEDY)))
        cut = ask(plain_vllm, vllm.request(_asked(question, GREEDY.model_copy(update={"max_tokens": 5 + 4 * number}))))
        assert cut.outcome == "truncated"
        assert cut.prompt_token_ids is not None
        assert cut.token_ids is not None

        begun = cut.prompt_token_ids + cut.token_ids
        rest = ask(plain_vllm, vllm.continuation(_asked(question, GREEDY, begun)))

        assert rest.prompt_token_ids == begun
        assert len(rest.token_ids or []) == rest.completion_tokens
        equal += cut.token_ids + (rest.token_ids or []) == whole.token_ids

    figure("cut answers that went on as the whole ones", f"{equal} of {len(QUESTIONS)}")
    assert equal == len(QUESTIONS)


def test_every_knob_is_one_that_real_vllm_takes(plain_vllm: httpx.Client) -> None:
    knobs = {"temperature": 0.7, "top_p": 0.95, "top_k": 1, "min_p": 0.01, "presence_penalty": 0.01}
    knobs |= {"frequency_penalty": 0.01, "repetition_penalty": 1.01}
    sampling = Sampling.model_validate({**knobs, "max_tokens": 128, "stop": ["**"], "reasoning_effort": "low"})

    answer = ask(plain_vllm, vllm.request(_asked(USER["content"], sampling)))

    assert answer.outcome == "ok"
    assert answer.reasoning
    assert "**" not in (answer.content or "")


def _asked(question: str, sampling: Sampling, ids: list[int] | None = None) -> Ask:
    messages = [{"role": "user", "content": question}]
    return Ask(model="tiny-target", messages=messages, sampling=sampling, seed=7, prompt_token_ids=ids)
