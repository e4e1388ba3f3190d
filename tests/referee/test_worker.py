"""The worker against real vLLM: what is stored is, token for token, what the engine says it produced."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from transformers import AutoTokenizer

from draftfleet.embedded import Embedded
from draftfleet.records import Sample
from draftfleet.runs import Run
from draftfleet.settings import load
from draftfleet.storage import open_storage
from producer.produce import produce

pytestmark = [pytest.mark.referee, pytest.mark.timeout(1800)]

NUM_PROMPTS = 64
DONE_S = 900
WORK = "from draftfleet.settings import load; from workers.app import work; raise SystemExit(work(load()))"


@contextmanager
def worker(flags: dict[str, object], log: Path) -> Generator[subprocess.Popen[bytes]]:
    """A worker process with these settings, drained at the end."""
    environment = {f"DRAFTFLEET_{path.upper().replace('.', '__')}": str(value) for path, value in flags.items()}
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", WORK], env={**os.environ, **environment}, stdout=output, stderr=subprocess.STDOUT
        )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def samples(plain_vllm: httpx.Client, target: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Sample]:
    """64 prompts through the queue and a real worker process, in four batches."""
    folder = tmp_path_factory.mktemp("worker")
    data = folder / "prompts.jsonl"
    questions = [f"Compute {number} + {97 - number}." for number in range(NUM_PROMPTS)]
    data.write_text("".join(json.dumps({"prompt": question}) + "\n" for question in questions))
    with Embedded(folder / "valkey") as valkey:
        flags: dict[str, object] = {
            "run": "referee",
            "storage.url": str(folder / "storage"),
            "queue.url": valkey.url,
            "target.model": "tiny-target",
            "target.path": str(target),
            "producer.data": str(data),
            "producer.batch_size": 16,
            "producer.heldout": 0,
            "sampling.max_tokens": 256,
            "sampling.temperature": 0,
            "worker.servers": json.dumps([str(plain_vllm.base_url)]),
            "worker.concurrency": 16,
        }
        settings = load(flags={**flags, "worker.servers": [str(plain_vllm.base_url)]})
        produce(settings, progress=False)
        run = Run.open(open_storage(settings.storage.url), "referee")
        log = folder / "worker.log"
        with worker(flags, log) as process:
            deadline = time.monotonic() + DONE_S
            while set(run.done()) != set(run.batches()):
                ended = process.poll() is not None or time.monotonic() > deadline
                assert not ended, log.read_text(errors="replace")[-4000:]
                time.sleep(0.1)
        return [sample for batch in run.done() for sample in run.read_samples(batch)]


def test_every_row_has_as_many_ids_as_the_engine_counted(
    samples: list[Sample], figure: Callable[[str, object], None]
) -> None:
    figure("rows through the worker", f"{len(samples)}, {sum(len(sample.token_ids) for sample in samples)} tokens")
    assert len(samples) == NUM_PROMPTS
    assert {(sample.outcome, sample.dialect, sample.ids_source) for sample in samples} <= {
        ("ok", "vllm", "engine"),
        ("truncated", "vllm", "engine"),
    }
    assert [sample.row_key for sample in samples if len(sample.token_ids) != sample.completion_tokens] == []
    assert [sample.row_key for sample in samples if len(sample.prompt_token_ids) != sample.prompt_tokens] == []


def test_the_ids_are_those_of_the_texts(samples: list[Sample], target: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(target)

    for sample in samples:
        text = tokenizer.decode(sample.token_ids)
        asked = tokenizer.apply_chat_template(sample.messages, add_generation_prompt=True, return_dict=True)

        assert sample.prompt_token_ids == asked["input_ids"]
        assert (sample.reasoning or "").strip() in text
        assert (sample.content or "").strip() in text


def test_the_reasoning_arrives_in_its_own_field(samples: list[Sample], figure: Callable[[str, object], None]) -> None:
    thought = [sample for sample in samples if sample.reasoning]

    figure("rows with reasoning", len(thought))
    assert len(thought) == NUM_PROMPTS
    assert {sample.reasoning_source for sample in thought} == {"reasoning"}
    assert all("<think>" not in (sample.content or "") for sample in samples)
