"""What `draftfleet bench` measures between servers whose speed and acceptance are known."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from draftfleet.benching import Options
from draftfleet.errors import DataError, Mismatch, NotReady, ServerError, SettingsError, Transient
from draftfleet.ports import free_port
from draftfleet.records import Prompt
from draftfleet.runs import Run
from draftfleet.settings import Settings, load
from draftfleet.testing import FakeServer
from draftfleet.testing.workers import changed
from workers.bench import Bench, differences, found
from workers.bench.counters import Counters
from workers.bench.measuring import Plan
from workers.bench.sides import Side, check_drafting
from workers.bench.streams import Answer

from .conftest import DRAFTING, TARGET, TIMES, no_prompts

Start = Callable[..., FakeServer]
Measure = Callable[..., Bench]


def test_speed_and_acceptance_are_those_of_the_servers(start: Start, measure: Measure, run: Run) -> None:
    result = measure(start(**DRAFTING, **TIMES), start(**TIMES))

    assert [level.concurrency for level in result.levels] == [1, 4]
    for level in result.levels:
        assert level.speedup is not None
        assert level.with_drafter is not None
        assert level.without is not None
        assert level.speedup.least <= level.speedup.median <= level.speedup.most
        assert level.speedup.most > 1  # a busy machine may stall in one of the windows
        assert level.with_drafter.tokens == level.without.tokens
        assert level.with_drafter.inter_token_s.least < level.without.inter_token_s.most
        assert level.with_drafter.first_token_s.median > TIMES["latency_s"] / DRAFTING["speed"]
        assert level.without.first_token_s.median > TIMES["latency_s"]
        assert level.with_drafter.acceptance_length == pytest.approx(2.952, abs=0.1)
        assert level.without.acceptance_length is None
        assert (level.equal, level.compared) == (level.with_drafter.requests * 2, level.with_drafter.requests * 2)
    assert result.acceptance is not None
    assert result.acceptance.source == "counters"
    assert result.acceptance.shares == pytest.approx([0.8, 0.64, 0.512], abs=0.03)
    assert sum(result.acceptance.per_position) == result.acceptance.accepted
    assert (result.warnings, result.differences, result.error) == ([], [], None)
    assert json.loads(run.storage.read("run/drafters/eagle3/bench.json")) == json.loads(result.to_json())


def test_the_counters_of_a_window_are_its_own(start: Start, measure: Measure) -> None:
    """What the server drafted before, and in the warm-up, is not in them."""
    server = start(**DRAFTING)
    measure(server)

    result = measure(server, concurrency=(2,), repeat=1)

    assert result.acceptance is not None
    assert result.levels[0].with_drafter is not None
    made = result.levels[0].with_drafter.tokens - result.levels[0].with_drafter.requests
    # A pass may keep more than what was left of the answer.
    assert made <= result.acceptance.drafts + result.acceptance.accepted <= made + 3 * 4


def test_both_servers_are_asked_the_same_by_turns(start: Start, measure: Measure) -> None:
    one, other = start(**DRAFTING), start()

    measure(one, other, concurrency=(2,), repeat=3)

    assert one.stats()["rows"] == other.stats()["rows"]
    assert one.stats()["requests"] == 2 + 3 * 4


def test_one_server_alone_has_figures_and_no_ratio(start: Start, measure: Measure) -> None:
    result = measure(start(**DRAFTING))

    assert result.without_url is None
    assert [(level.without, level.speedup, level.compared) for level in result.levels] == [(None, None, None)] * 2
    assert result.acceptance is not None


def test_above_temperature_zero_answers_are_not_compared(start: Start, measure: Measure) -> None:
    result = measure(start(**DRAFTING), start(tokens=40), temperature=0.7)

    assert {level.compared for level in result.levels} == {None}
    assert result.differences == []


def test_answers_that_part_are_told_with_their_place(start: Start, measure: Measure) -> None:
    """A server that says more; it has no log-probabilities, so whether there was a near tie stays open."""
    result = measure(start(**DRAFTING), start(tokens=48), concurrency=(1,), repeat=1, limit=2)

    assert (result.levels[0].equal, result.levels[0].compared) == (0, 2)
    assert len(result.differences) == 2
    assert {one.gap for one in result.differences} == {None}
    assert not any(one.is_near_tie for one in result.differences)


def test_a_server_that_hangs_once_all_is_measured_costs_the_reason_of_a_difference_alone(
    start: Start, measure: Measure, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(differences, "PATIENCE_S", 0.2)
    other = start(tokens=48)
    other.fault("hang", after=1 + 2)

    result = measure(start(**DRAFTING), other, concurrency=(1,), repeat=1, limit=2)

    assert other.stats()["faults"]["hang"] == 2
    assert [one.gap for one in result.differences] == [None, None]
    assert result.error is None


def test_the_checkpoint_is_that_of_the_latest_export_for_the_engine(start: Start, measure: Measure, run: Run) -> None:
    for folder, step in (("vllm", 100), ("speculators", 200), ("sglang", 300)):
        run.storage.put(f"run/drafters/eagle3/export/{folder}/export.json", json.dumps({"step": step}).encode())

    result = measure(start(**DRAFTING), concurrency=(1,), repeat=1)

    assert (result.drafter, result.checkpoint) == ("eagle3", "step-000200")


def test_a_server_that_counts_no_tokens_is_refused(start: Start, measure: Measure) -> None:
    server = start(**DRAFTING)
    server.fault("no_usage")

    with pytest.raises(Mismatch, match="counted no tokens of an answer"):
        measure(server)


def test_a_number_of_requests_that_is_named_twice_is_measured_once(start: Start, measure: Measure) -> None:
    result = measure(start(**DRAFTING), concurrency=(2, 2), repeat=1)

    assert [level.with_drafter.windows for level in result.levels if level.with_drafter] == [1]


@pytest.mark.parametrize("tokenizer", [True, False], ids=["each answer", "a gauge"])
def test_sglang_tells_by_its_answers_where_it_can_be_asked_with_ids(
    start: Start, settings: Settings, tokenizer: bool
) -> None:
    knobs = {"shape": "sglang", "tokenizer": str(TARGET)}
    one, other = start(**knobs, **DRAFTING), start(**knobs)
    with_target = changed(settings, target__path=str(TARGET)) if tokenizer else settings

    result = found(
        with_target,
        Options(with_url=one.url, without_url=other.url, concurrency=[2], limit=4, repeat=1, max_tokens=32),
        first_prompts=no_prompts,
    )

    assert result.dialect == ("sglang-native" if tokenizer else "sglang")
    assert result.levels[0].equal == result.levels[0].compared == 4
    assert result.acceptance is not None
    assert result.acceptance.source == ("answers" if tokenizer else "gauge")
    assert result.acceptance.length == pytest.approx(2.952, abs=0.25)
    assert len(result.acceptance.shares) == (3 if tokenizer else 0)
    assert ["gauge" in one for one in result.warnings] == ([] if tokenizer else [True])


def test_requests_of_other_clients_are_told(start: Start, measure: Measure) -> None:
    server = start(**DRAFTING, **TIMES)
    ended = threading.Event()

    def ask_too() -> None:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "Another?"}], "max_tokens": 5}
        while not ended.is_set():
            server._call("/v1/chat/completions", body)

    other = threading.Thread(target=ask_too)
    other.start()
    try:
        result = measure(server, concurrency=(1,), repeat=1)
    finally:
        ended.set()
        other.join()

    assert "requests of other clients while it was measured" in result.warnings[0]
    assert "1 at once, repeat 1" in result.warnings[0]


def test_more_at_once_than_there_are_prompts_is_told(start: Start, measure: Measure) -> None:
    result = measure(start(**DRAFTING), concurrency=(16,), repeat=1)

    assert result.levels[0].with_drafter is not None
    assert result.levels[0].with_drafter.requests == 16
    assert result.warnings == ["there are 12 prompts, and 16 are asked at once: some were asked more than once"]


def test_a_drafter_of_which_nothing_is_kept_is_told(start: Start, measure: Measure) -> None:
    result = measure(start(draft_tokens=3, keep=0.0), concurrency=(1,), repeat=1)

    assert result.acceptance is not None
    assert result.acceptance.length == 1.0
    assert "not one drafted token was kept" in result.warnings[0]


def test_what_was_measured_is_kept_when_a_server_ends(start: Start, measure: Measure, run: Run) -> None:
    one, other = start(**DRAFTING), start()
    other.fault("die", after=1 + 2 * 4 + 4 + 3)  # in the first window of four at once

    with pytest.raises(Transient, match="broke"):
        measure(one, other)

    kept: dict[str, Any] = json.loads(run.storage.read("run/drafters/eagle3/bench.json"))
    assert [level["concurrency"] for level in kept["levels"]] == [1, 4]
    assert kept["levels"][0]["speedup"] is not None
    assert kept["levels"][1]["without"] is None
    assert other.url in kept["error"]


def test_a_server_that_is_full_ends_it(start: Start, measure: Measure) -> None:
    server = start(**DRAFTING)
    server.fault("status", status=429)

    with pytest.raises(ServerError, match="429"):
        measure(server)


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        ({}, {}, r"--with \S+ does not draft: its /metrics page has no counters of drafts"),
        (DRAFTING, DRAFTING, r"--without \S+ drafts as well"),
        (DRAFTING, {"model": "other"}, r"--without \S+ serves other, and 'tiny' is asked for"),
        (DRAFTING, {"shape": "llamacpp"}, "speaks llamacpp: only vLLM and SGLang tell"),
        (DRAFTING, {"shape": "sglang"}, "two engines are no comparison"),
        (DRAFTING, {"ready": False}, "does not answer: GET /v1/models answered 503"),
    ],
    ids=["not drafting", "both draft", "other model", "no counters", "two engines", "not ready"],
)
def test_servers_that_are_no_pair_are_refused_before_anything_is_measured(
    start: Start, measure: Measure, first: dict[str, Any], second: dict[str, Any], said: str
) -> None:
    one, other = start(**first), start(**second)

    with pytest.raises((Mismatch, NotReady), match=said):
        measure(one, other)

    assert other.stats()["requests"] <= 1


def test_a_drafter_that_stands_still_is_told() -> None:
    class Still(Side):
        async def counters(self) -> Counters:
            return Counters(requests=1, drafts=0)

    side = Still("with", "http://a:1", client=None, dialect=None, model="tiny")  # type: ignore[arg-type]

    with pytest.raises(Mismatch, match="--with http://a:1 has a drafter, and drafted nothing in 16 tokens"):
        asyncio.run(check_drafting(side, [Answer(0.0, tokens=16)]))
    asyncio.run(check_drafting(side, [Answer(0.0, tokens=1)]))  # too short to tell


def test_without_a_run_s_name_for_it_both_must_serve_one_model(start: Start, settings: Settings) -> None:
    one, other = start(**DRAFTING), start(model="tiny-too")
    prompts = [Prompt("p1", "heldout", [{"role": "user", "content": "Why?"}])]

    with pytest.raises(Mismatch, match="two models are no comparison"):
        found(
            settings.model_copy(update={"run": "absent"}),
            Options(with_url=one.url, without_url=other.url, file="prompts.jsonl"),
            first_prompts=lambda settings, count: prompts,
        )


def test_a_server_that_is_not_there_is_told(measure: Measure, settings: Settings) -> None:
    with pytest.raises(NotReady, match="it does not answer"):
        found(settings, Options(with_url=f"http://127.0.0.1:{free_port()}"), first_prompts=no_prompts)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"without_url": "http://127.0.0.1:1/v1/"}, "--with and --without are both http://127.0.0.1:1"),
        ({"concurrency": []}, r"--concurrency \(nothing\): numbers from 1"),
        ({"concurrency": [0]}, "--concurrency 0: numbers from 1"),
        ({"repeat": 0}, "--repeat 0"),
        ({"limit": -1}, "--limit -1"),
        ({"max_tokens": 0}, "--max-tokens 0: numbers from 1"),
        ({"temperature": -0.5}, "--temperature -0.5: 0 for greedy"),
        ({"without_url": "localhost"}, "--without localhost"),
        ({"without_url": "http://127.0.0.1:1-3"}, "one server, not 3"),
    ],
)
def test_options_that_make_no_sense_are_refused(settings: Settings, options: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        found(settings, Options(with_url="http://127.0.0.1:1", **options), first_prompts=no_prompts)


def test_a_run_without_held_out_prompts_is_told(run: Run) -> None:
    settings = load(flags={"storage.url": run.storage.url, "run": "run"})

    with pytest.raises(DataError, match=r"run run has no held-out prompts: name a file with --prompts, or produce"):
        found(settings, Options(with_url="http://127.0.0.1:1"), first_prompts=no_prompts)
    with pytest.raises(DataError, match="there is no run absent in"):
        found(
            settings.model_copy(update={"run": "absent"}),
            Options(with_url="http://127.0.0.1:1"),
            first_prompts=no_prompts,
        )
    with pytest.raises(DataError, match=r"empty.jsonl has no prompts: name another file"):
        found(
            settings,
            Options(with_url="http://127.0.0.1:1", file="empty.jsonl"),
            first_prompts=lambda settings, count: [],
        )


def test_a_drafter_that_the_run_does_not_have_gets_no_file(start: Start, settings: Settings, run: Run) -> None:
    options = Options(with_url=start(**DRAFTING).url, concurrency=[1], limit=1, repeat=1, max_tokens=8)

    found(changed(settings, trainer__drafter="another"), options, first_prompts=no_prompts)

    assert not run.storage.exists("run/drafters/another/bench.json")


def test_a_window_has_two_waves_where_there_are_as_many_prompts() -> None:
    plan = Plan(list(range(20)), limit=6, concurrency=(1, 4, 8, 32), repeat=1)  # type: ignore[arg-type]

    assert [len(plan.window(level)) for level in plan.concurrency] == [6, 8, 16, 32]
    assert plan.window(32)[:20] == list(range(20))
    assert plan.requests(2) == 2 * (1 + 6 + 4 + 8 + 8 + 16 + 32 + 32)


def test_the_package_needs_no_torch() -> None:
    folder = Path(__file__).parents[3] / "workers/bench"

    assert not [path for path in folder.glob("*.py") if "torch" in path.read_text().replace("needs no torch", "")]
