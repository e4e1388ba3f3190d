"""`draftfleet continue` against real vLLM: a greedy answer that was cut and went on is, id for id, the uncut one."""

import json
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from draftfleet.accounting import Accountant
from draftfleet.continuing import go_on
from draftfleet.embedded import Embedded
from draftfleet.outcomes import best
from draftfleet.records import Sample
from draftfleet.runs import Run
from draftfleet.settings import Settings, load
from draftfleet.storage import open_storage
from draftfleet.testing.workers import WorkerProcess
from producer.produce import produce

pytestmark = [pytest.mark.referee, pytest.mark.timeout(1800)]

NUM_PROMPTS = 24
CUT_AT = 16
MOST_TOKENS = 192
DONE_S = 900


def _samples(run: Run, worker: WorkerProcess) -> dict[str, Sample]:
    """All rows of a run once nothing of it is outstanding."""
    deadline = time.monotonic() + DONE_S
    while run.outstanding():
        assert time.monotonic() < deadline, worker.log.read_text(errors="replace")[-4000:]
        time.sleep(0.1)
    return best(sample for batch in run.done() for sample in run.read_samples(batch))


def test_a_cut_answer_goes_on_token_for_token_as_if_it_had_never_been_cut(
    plain_vllm: httpx.Client, target: Path, tmp_path: Path, figure: Callable[[str, object], None]
) -> None:
    data = tmp_path / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"Compute {n} + {97 - n}."}) + "\n" for n in range(NUM_PROMPTS)))

    def settings(run: str, max_tokens: int) -> Settings:
        return load(
            flags={
                "run": run,
                "storage.url": str(tmp_path / "storage"),
                "storage.min_free_gb": 0,
                "queue.url": valkey.url,
                "target.model": "tiny-target",
                "target.path": str(target),
                "producer.data": str(data),
                "producer.batch_size": 8,
                "producer.heldout": 0,
                "sampling.max_tokens": max_tokens,
                "sampling.temperature": 0,
                "worker.servers": [str(plain_vllm.base_url)],
                "worker.concurrency": 8,
            }
        )

    with Embedded(tmp_path / "valkey") as valkey:
        short, whole = settings("short", CUT_AT), settings("whole", MOST_TOKENS)
        for one in (short, whole):
            produce(one, progress=False)
        store = open_storage(short.storage.url)
        cut_run, whole_run = Run.open(store, "short"), Run.open(store, "whole")
        with WorkerProcess(short, tmp_path / "worker.log") as worker:
            wanted, cut = _samples(whole_run, worker), _samples(cut_run, worker)
            said = go_on(short, max_tokens=MOST_TOKENS, dry_run=False)
            kept = _samples(cut_run, worker)

    num_cut = sum(sample.outcome == "truncated" for sample in cut.values())
    figure("answers that went on", f"{num_cut}, {sum(len(one.token_ids) for one in kept.values())} tokens in all")
    assert said["rows"] == num_cut == NUM_PROMPTS
    assert {key: one.token_ids for key, one in kept.items()} == {key: one.token_ids for key, one in wanted.items()}
    for key, sample in kept.items():
        other = wanted[key]
        assert sample.prompt_token_ids == other.prompt_token_ids
        assert (sample.finish_reason, sample.completion_tokens) == (other.finish_reason, other.completion_tokens)
        assert (sample.reasoning or "").strip() == (other.reasoning or "").strip()
        assert (sample.content or "").strip() == (other.content or "").strip()
        assert sample.ids_match_usage
    assert Accountant(cut_run).account().holds
