"""The estimate, worked out by hand, and what earlier runs tell of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from draftfleet.names import batch_id
from draftfleet.records import Prompt, Sample
from draftfleet.runs import Run
from draftfleet.storage import FileStorage
from producer.preview.evidence import ENOUGH_ROWS, Evidence, evidence
from producer.preview.lengths import Lengths
from producer.preview.survey import Survey
from producer.preview.work import (
    BYTES_PER_COMPLETION_TOKEN,
    BYTES_PER_PROMPT_TOKEN,
    RATES,
    USUAL_TOKENS,
    Work,
    work,
)

MakePrompts = Callable[..., list[Prompt]]
MakeSample = Callable[..., Sample]

EARLIER = Evidence(run="old", answers=640, mean_tokens=900.0, bytes_per_token=7.5, tokens_per_s=3000.0, servers=4)


def estimated(**changes: Any) -> Work:
    knobs: dict[str, Any] = {
        "samples": 1, "earlier": None, "mean_tokens": None, "tokens_per_s": None, "servers": 0, "named_servers": 0,
        "free_bytes": None,
    }  # fmt: skip
    lengths = Lengths(unit="tokens", measured=10, of=1000, mean=120.0, max_tokens=changes.pop("max_tokens", 8192))
    return work(Survey(source="a", new=1000, answers=1500), lengths, **knobs | changes)


def test_what_a_person_says_is_taken() -> None:
    found = estimated(samples=2, mean_tokens=1000, tokens_per_s=2000, servers=7)

    assert (found.answers, found.tokens, found.prompt_tokens) == (3000, 3_000_000, 240_000)
    [hours] = found.hours
    assert hours.server_hours == pytest.approx(3_000_000 / 2000 / 3600)
    assert hours.hours == pytest.approx(3_000_000 / 2000 / 3600 / 7)
    assert found.bytes == 3_000_000 * BYTES_PER_COMPLETION_TOKEN + 240_000 * BYTES_PER_PROMPT_TOKEN
    assert found.because["mean_tokens"] == "--mean-tokens"


def test_where_nothing_is_known_it_guesses_and_says_so() -> None:
    found, short = estimated(), estimated(max_tokens=300)

    assert (found.mean_tokens, short.mean_tokens) == (USUAL_TOKENS, 300)
    assert "a guess, usual for answers with reasoning" in found.because["mean_tokens"]
    assert "a guess, sampling.max_tokens" in short.because["mean_tokens"]
    assert [one.tokens_per_s for one in found.hours] == list(RATES)
    assert (found.servers, found.because["servers"]) == (1, "a guess: --num-servers says it")


def test_what_was_measured_comes_before_a_guess_and_after_a_person() -> None:
    measured, said = estimated(earlier=EARLIER, named_servers=3), estimated(earlier=EARLIER, mean_tokens=50, servers=2)

    assert (measured.mean_tokens, measured.servers, said.mean_tokens, said.servers) == (900, 3, 50, 2)
    assert measured.because["mean_tokens"] == "the mean of 640 answers in run old"
    assert [one.tokens_per_s for one in measured.hours] == [3000]
    assert measured.bytes == 1500 * 900 * 7.5
    assert estimated(earlier=EARLIER, max_tokens=100).mean_tokens == 100


def committed(run: Run, prompts: list[Prompt], make_sample: MakeSample, number: int, server: str = "http://a") -> None:
    batch = batch_id("train", number)
    samples = [
        make_sample(prompt, batch, token_ids=[5] * 40, completion_tokens=40, server=server) for prompt in prompts
    ]
    assert run.commit(batch, samples)
    run.index.flush()


def test_earlier_samples_tell_length_size_and_number_of_servers(
    run: Run, storage: FileStorage, make_prompts: MakePrompts, make_sample: MakeSample
) -> None:
    for number, server in enumerate(("http://a", "http://b")):
        committed(run, make_prompts(ENOUGH_ROWS, start=100 * number), make_sample, number, server)

    found = evidence(storage, "run", "tiny")

    assert found is not None
    assert (found.run, found.answers, found.mean_tokens, found.servers) == ("run", 2 * ENOUGH_ROWS, 40, 2)
    assert found.bytes_per_token == sum(run.done_bytes().values()) / (2 * ENOUGH_ROWS * 40)
    first, last = sorted(entry.written_at for entry in run.index.read().values())
    assert found.tokens_per_s == pytest.approx(ENOUGH_ROWS * 40 / (last - first) / 2)


def test_another_run_of_the_same_target_tells_it_too_and_one_of_another_target_does_not(
    run: Run, storage: FileStorage, make_prompts: MakePrompts, make_sample: MakeSample
) -> None:
    committed(run, make_prompts(ENOUGH_ROWS), make_sample, 0)

    same, other = evidence(storage, "new", "tiny"), evidence(storage, "new", "large")

    assert same is not None
    assert (same.run, same.tokens_per_s) == ("run", None)  # one shard tells no speed
    assert other is None


def test_a_handful_of_answers_and_a_run_of_whole_conversations_tell_nothing(
    storage: FileStorage, run: Run, make_prompts: MakePrompts, make_sample: MakeSample
) -> None:
    committed(run, make_prompts(ENOUGH_ROWS - 1), make_sample, 0)
    turns = Run.create(storage, "turns", {"target.model": "tiny", "producer.turns": "all"}, {})
    committed(turns, make_prompts(ENOUGH_ROWS), make_sample, 0)

    assert evidence(storage, "run", "tiny") is None
    assert evidence(storage, "turns", "tiny") is None
    assert evidence(FileStorage(storage.root / "nowhere"), "run", "tiny") is None
