"""Conversations against real vLLM: of every turn, the prompt that the engine saw is our rendering of its prefix."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest

from draftfleet import tokens
from draftfleet.embedded import Embedded
from draftfleet.records import Sample
from draftfleet.runs import Run
from draftfleet.settings import load
from draftfleet.storage import open_storage
from draftfleet.testing.workers import WorkerProcess
from draftfleet.tokens import TargetTokenizer
from draftfleet.training_rows import TurnRow, rows_of
from producer.produce import produce

pytestmark = [pytest.mark.referee, pytest.mark.timeout(1800)]

DONE_S = 900
TEMPLATE = Path(__file__).parent / "tools.jinja"
"""It drops the reasoning of answers before the last user turn, keeps that of later ones, and writes tools and ids."""

NUM_CONVERSATIONS = 16
CALLS = "\n".join(
    f'<tool_call>{{"name": "{name}", "arguments": {{"x": {digit}}}}}</tool_call>'
    for name, digit in (("add", "[0-9]"), ("sub", "[0-9]"))
)
BOTH_TOOLS = CALLS.replace("{", r"\{").replace("}", r"\}")
"""A pattern of what the target writes after its thought: it never learned to call tools, and parallel calls at that."""


def function(name: str) -> dict[str, Any]:
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
    return {"type": "function", "function": {"name": name, "description": "A tool.", "parameters": schema}}


def call(name: str, identity: str) -> dict[str, Any]:
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": '{"x": 1}'}}


def with_tools(number: int) -> dict[str, Any]:
    """Its calls and results come in another order than the target's calls will."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"What is {number} + {number + 2}?"}]
    for turn in range(2):
        messages += [
            {"role": "assistant", "content": None, "tool_calls": [call("sub", f"s{turn}"), call("add", f"a{turn}")]},
            {"role": "tool", "content": f"{number} of add", "tool_call_id": f"a{turn}"},
            {"role": "tool", "content": f"{number} of sub", "tool_call_id": f"s{turn}"},
        ]
    return {"messages": messages, "tools": [function("add"), function("sub")]}


def in_words(number: int) -> dict[str, Any]:
    asked = [f"What is {number} + {turn + 3}?" for turn in range(3)]
    messages = [message for text in asked for message in ({"role": "user", "content": text}, SAID)]
    return {"messages": messages}


SAID = {"role": "assistant", "content": "The source's answer.", "reasoning_content": "The source's thought."}


@pytest.fixture(scope="module")
def folder(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target with the template that it is served with."""
    folder = tmp_path_factory.mktemp("target")
    for file in target.glob("*.json"):
        shutil.copy(file, folder)
    shutil.copy(TEMPLATE, folder / "chat_template.jinja")
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> TargetTokenizer:
    return tokens.load(folder)


@pytest.fixture(scope="module")
def vllm(start_vllm: Callable[..., AbstractContextManager[httpx.Client]]) -> Iterator[httpx.Client]:
    options = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--chat-template", str(TEMPLATE)]
    with start_vllm(*options) as client:
        yield client


@pytest.fixture
def collect(vllm: httpx.Client, folder: Path, tmp_path: Path) -> Callable[..., list[Sample]]:
    """Lets a producer and a real worker process have these conversations with the target."""

    def run(lines: list[dict[str, Any]], **sampling: Any) -> list[Sample]:
        data = tmp_path / "conversations.jsonl"
        data.write_text("".join(json.dumps(line) + "\n" for line in lines))
        with Embedded(tmp_path / "valkey") as valkey:
            flags: dict[str, Any] = {
                "run": "referee",
                "storage.url": str(tmp_path / "storage"),
                "queue.url": valkey.url,
                "target.model": "tiny-target",
                "target.path": str(folder),
                "producer.data": str(data),
                "producer.turns": "all",
                "producer.heldout": 0,
                "sampling.max_tokens": 256,
                "worker.servers": [str(vllm.base_url)],
                "worker.concurrency": 8,
            }
            settings = load(flags=flags | {f"sampling.{name}": value for name, value in sampling.items()})
            produce(settings, progress=False)
            run = Run.open(open_storage(settings.storage), "referee")
            with WorkerProcess(settings, tmp_path / "worker.log") as worker:
                deadline = time.monotonic() + DONE_S
                while set(run.done()) != set(run.batches()):
                    ended = not worker.is_running or time.monotonic() > deadline
                    assert not ended, worker.log.read_text(errors="replace")[-4000:]
                    time.sleep(0.1)
            return [sample for batch in run.done() for sample in run.read_samples(batch)]

    return run


def assert_exact(rows: list[TurnRow], tokenizer: TargetTokenizer, tools: list[dict[str, Any]] | None) -> None:
    for row in rows:
        assert row.ids_source == "engine"
        assert row.ids_match_usage
        assert tokenizer.decode(row.prompt_token_ids) == tokenizer.decode(tokenizer.prompt_ids(row.messages, tools))
        assert row.prompt_token_ids == tokenizer.prompt_ids(row.messages, tools)


def test_every_turn_has_the_prompt_that_the_engine_saw(
    collect: Callable[..., list[Sample]], tokenizer: TargetTokenizer, figure: Callable[[str, object], None]
) -> None:
    samples = collect([in_words(number) for number in range(NUM_CONVERSATIONS)], temperature=0.7, seed=1)

    rows = [row for sample in samples for row in rows_of(sample)]
    figure("turns of conversations", f"{len(rows)}, {sum(sample.ended is not None for sample in samples)} ended early")
    assert len(samples) == NUM_CONVERSATIONS
    assert sum(len(sample.turns) == 2 for sample in samples) > NUM_CONVERSATIONS / 2
    assert not any("source's" in str(row.messages) for row in rows)
    assert_exact(rows, tokenizer, None)


def test_tool_calls_results_and_the_reasoning_between_them_are_in_the_prompt_of_the_next_turn(
    collect: Callable[..., list[Sample]], tokenizer: TargetTokenizer, figure: Callable[[str, object], None]
) -> None:
    lines = [with_tools(number) for number in range(NUM_CONVERSATIONS)]

    samples = collect(lines, temperature=0, extra_body={"structured_outputs": {"regex": BOTH_TOOLS}})

    rows = [row for sample in samples for row in rows_of(sample)]
    whole = [sample for sample in samples if len(sample.turns) == 2]
    figure("turns with tools", f"{len(rows)}, {len(whole)} of {len(samples)} conversations to their end")
    assert len(whole) > NUM_CONVERSATIONS / 2
    assert_exact(rows, tokenizer, lines[0]["tools"])
    for sample in whole:
        first, add, sub, *_ = sample.messages[1:]
        made = {one["function"]["name"]: one["id"] for one in first["tool_calls"]}
        assert first["reasoning_content"] in tokenizer.decode(rows_of(sample)[1].prompt_token_ids)
        assert (add["tool_call_id"], add["content"].partition(" of ")[2]) == (made["add"], "add")
        assert (sub["tool_call_id"], sub["content"].partition(" of ")[2]) == (made["sub"], "sub")
