"""What `draftfleet status` gathers: every key is on its page, and what stands still is named with what to do."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import pytest
import redis
from rich.console import Console

from draftfleet import live
from draftfleet.accounting import Accountant
from draftfleet.live import GaugesReport, LengthsReport, RunReport, ServerReport, WorkerReport
from draftfleet.names import batch_id
from draftfleet.queue import connect, make_app, publish
from draftfleet.records import Prompt, Sample
from draftfleet.runs import Run
from draftfleet.settings import Settings
from draftfleet.status import Seen, collect, next_step, render, warnings
from draftfleet.status.panels import line
from draftfleet.storage import FileStorage
from trainer.best import Acceptance
from trainer.progress import Progress

PAGE = Path(__file__).parents[2] / "docs/status.md"
MODEL = "tiny"
DONE, WAITING = batch_id("train", 0), batch_id("train", 1)
SERVER = "http://127.0.0.1:8000"

ANY_KEY = {
    "wasted_tokens": "CAUSE",
    "wasted": "CAUSE",
    "ended": "BIN",
    "going": "BIN",
    "drafters": "NAME",
    "rows_not_trained": "WHY",
}
"""Tables whose keys are no names of ours, with what stands for them on the page. BIN is of `lengths` alone."""


@pytest.fixture
def client(settings: Settings) -> redis.Redis:
    return connect(settings)


@pytest.fixture
def half_done(
    settings: Settings,
    client: redis.Redis,
    run: Run,
    make_prompts: Callable[..., list[Prompt]],
    make_sample: Callable[..., Sample],
) -> Run:
    """Of one batch two rows are ok and two failed, in different ways; one of two rows waits."""
    run.write_prompts(DONE, make_prompts(4))
    run.write_prompts(WAITING, make_prompts(2, start=4))
    run.seal({"prompts": 6, "drawn": [{"thinking": True, "rows": 4}, {"thinking": False, "rows": 2}]})
    publish(make_app(settings), client, run, MODEL, [DONE, WAITING])
    one, two, three, four = run.read_prompts(DONE)
    failed = {"outcome": "failed", "server": SERVER, "completion_tokens": -1, "token_ids": [], "ids_source": "none"}
    run.commit(
        DONE,
        [
            make_sample(one, started_at=time.time() - 5),
            make_sample(two, started_at=time.time() - 3),
            make_sample(three, **failed, error="too long: 40000", error_kind="bad_request", error_status=400),
            make_sample(four, **failed, error="no answer in 6 tries", error_kind="transient"),
        ],
    )
    run.index.flush()
    return run


@pytest.fixture
def look(settings: Settings, storage: FileStorage, half_done: Run) -> Callable[[], dict[str, Any]]:
    return lambda: collect(settings, Accountant(Run.open(storage, half_done.name)))


def report(run: Run, **fields: Any) -> WorkerReport:
    """Of a worker that is at work on one server."""
    server = ServerReport(
        url=SERVER,
        state="ready",
        in_flight=2,
        limit=4,
        gauges=GaugesReport(generated_tokens=900),
        rows=2,
        tokens=90,
        tokens_per_s=12.0,
        slot_s=100.0,
        busy_s=80.0,
        speed=3.0,
    )
    told = RunReport(
        run=run.name, run_id=run.run_id, ok=1, lengths=[LengthsReport(source="", ended={8: 2}, going={5: 1})]
    )
    values: dict[str, Any] = {
        "process": "node-7-ab", "host": "node", "pid": 7, "started_at": 0, "state": "working", "model": MODEL,
        "servers": [server], "batches_held": 1, "rows_in_flight": 2, "wasted": {"retried": 10}, "runs": [told],
    }  # fmt: skip
    return WorkerReport(**values | fields)


def keys_of(value: Any, path: str = "", name: str = "") -> Iterator[str]:
    """`batches.done`, `workers[].servers[].url`, `drafters.NAME.step`."""
    if isinstance(value, dict) and value:
        for key, one in cast(dict[str, Any], value).items():
            is_any = name in ANY_KEY and (name not in ("ended", "going") or "lengths" in path)
            shown = ANY_KEY[name] if is_any else key
            shown = "KNOB" if name == "drawn" and key not in ("rows", "share") else shown
            yield from keys_of(one, f"{path}.{shown}" if path else shown, key if not is_any else "")
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        for one in cast(list[Any], value):
            yield from keys_of(one, f"{path}[]", name)
    else:
        yield path


def documented() -> set[str]:
    rows = re.findall(r"^\| (`[a-z_]+.*?) \|", PAGE.read_text(), flags=re.MULTILINE)
    return {key for row in rows for key in re.findall(r"`([^`]+)`", row)}


def test_every_key_of_the_state_is_on_its_page_and_no_other(
    half_done: Run, client: redis.Redis, look: Callable[[], dict[str, Any]]
) -> None:
    live.publish(client, report(half_done))
    folder = half_done.drafter_dir("eagle3")
    folder.mkdir(parents=True)
    (folder / "drafter-settings.json").write_text('{"trainer": {"max_steps": 60}}')
    Progress(step=3, max_steps=60, rows_not_trained={"heldout": 1}).write(half_done, "eagle3")
    best = Acceptance(
        step=2, acceptance_length=2.0, acceptance_per_position=[0.5], k=3, prompts=8, max_tokens=64, drafts=9,
        seconds=1.0, asked="ab",
    )  # fmt: skip
    half_done.storage.put(
        f"{half_done.name}/drafters/eagle3/best.json",
        str({"checkpoint": "step-000002", **asdict(best)}).replace("'", '"').encode(),
    )

    state = look()
    state["next"] = {"because": "", "do": ""}

    assert set(keys_of(state)) == documented()


def test_failed_rows_are_told_by_class_with_the_newest_as_example(look: Callable[[], dict[str, Any]]) -> None:
    state = look()

    classes = [(one["kind"], one["status"], one["rows"], one["example"]) for one in state["errors"]["classes"]]
    assert classes == [("bad_request", 400, 1, "too long: 40000"), ("transient", None, 1, "no answer in 6 tries")]
    assert state["errors"]["rows"] == state["failed"] == 2


def test_a_second_look_reads_no_shard_again_and_says_the_same(
    settings: Settings, storage: FileStorage, half_done: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    accountant, seen = Accountant(Run.open(storage, half_done.name)), Seen()
    first = collect(settings, accountant, seen)

    monkeypatch.delattr(Run, "columns")
    second = collect(settings, accountant, seen)

    assert (second["errors"], second["nodes"]) == (first["errors"], first["nodes"])


def test_pace_share_waste_and_nodes_are_told(
    half_done: Run, client: redis.Redis, look: Callable[[], dict[str, Any]]
) -> None:
    live.publish(client, report(half_done))
    live.publish(client, report(half_done, process="other-8-cd", host="other", runs=[]))

    state = look()

    assert state["throughput"]["tokens_per_s"] == 24.0
    assert state["throughput"]["share_of_full"] == pytest.approx(0.8 * 180 / 200)
    assert state["throughput"]["mean_tokens_per_s"] == pytest.approx(6 / 5, rel=0.2)
    assert state["wasted_tokens"] == {"retried": 20}
    told = {node["node"]: (node["ok"], node["failed"], node["workers"]) for node in state["nodes"]}
    assert {("node", 1), ("other", 1)} <= {(name, counts[2]) for name, counts in told.items()}
    assert sum(counts[0] for counts in told.values()) == 2
    assert line(state).startswith("run run: 5 of 6 rows (83.3%), 24 tok/s now")


def silent(run: Run) -> WorkerReport:
    one = report(run)
    return one.model_copy(update={"servers": [one.servers[0].model_copy(update={"silent_s": 312.0})]})


def away(run: Run) -> WorkerReport:
    one = report(run)
    gone = one.servers[0].model_copy(update={"state": "away", "reason": "connection refused"})
    return one.model_copy(update={"servers": [gone], "state": "waiting"})


def elsewhere(run: Run) -> WorkerReport:
    return report(run, model="another")


@pytest.mark.parametrize(
    ("make", "because", "do"),
    [
        (None, "no worker is there", "start `draftfleet work"),
        (away, "none of 1 servers is ready", "start the servers"),
        (silent, "no token for 5 min, with 2 requests in flight", "restart what hangs"),
        (elsewhere, "Those that are there serve another", "start `draftfleet work"),
    ],
)
def test_the_last_line_says_what_to_do_when_nothing_gets_on(
    half_done: Run,
    client: redis.Redis,
    look: Callable[[], dict[str, Any]],
    make: Callable[[Run], WorkerReport] | None,
    because: str,
    do: str,
) -> None:
    if make:
        live.publish(client, make(half_done))

    state = look()

    assert because in state["next"]["because"]
    assert do in state["next"]["do"]
    console = Console(record=True, width=100)
    console.print(render(state))
    assert console.export_text().rstrip().splitlines()[-1].startswith("Next: ")


def test_while_all_goes_on_nothing_is_to_be_done(
    half_done: Run, client: redis.Redis, look: Callable[[], dict[str, Any]]
) -> None:
    live.publish(client, report(half_done))

    assert look()["next"] is None


def test_a_disk_that_will_be_too_small_and_a_redis_that_cannot_write_are_told(
    look: Callable[[], dict[str, Any]],
) -> None:
    state = look()
    state["storage"] |= {"free_bytes": 3_000_000_000, "min_free_bytes": 1_000_000_000, "needed_bytes": 9_000_000_000}
    state["redis"] |= {"can_write": False}

    said = " ".join(warnings(state))

    assert "Redis cannot write its append-only file" in said
    assert "has 3.0 GB left, and the pending rows need about 9.0 GB: make room in time" in said
    first = next_step(state)
    assert first is not None
    assert "make room on the disk of Redis" in first["do"]


def test_no_line_is_wider_than_the_window_and_no_figure_is_torn_from_its_name(
    half_done: Run, client: redis.Redis, look: Callable[[], dict[str, Any]]
) -> None:
    live.publish(client, report(half_done))
    state = look()

    for width in (40, 60, 80, 200):
        console = Console(record=True, width=width)
        console.print(render(state))
        said = console.export_text()
        assert all(len(one) <= width for one in said.splitlines())
        for whole in ("127.0.0.1:8000", "12 tok/s now", "72% of what full servers make", "too long: 40000"):
            assert whole in said, width
