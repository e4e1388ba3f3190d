"""Real worker processes, a real Valkey, fake servers: what a healthy fleet does."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from draftfleet import live
from draftfleet.accounting import Accountant
from draftfleet.claims import Claims
from draftfleet.columns import SAMPLE_SCHEMA
from draftfleet.queue import connect, generate_queue, keys, make_app, queued, retry_queue
from draftfleet.records import Prompt
from draftfleet.runs import Run
from draftfleet.settings import Settings
from draftfleet.status import collect
from draftfleet.storage import FileStorage
from draftfleet.testing import FakeServer
from draftfleet.testing.workers import WorkerProcess, changed, enqueue

Until = Callable[..., Any]
MakePrompts = Callable[..., list[Prompt]]
TINY_TARGET = Path(__file__).parents[2] / "examples/tiny-target"


def test_every_row_is_asked_once_over_two_servers_and_committed_with_all_it_needs(
    settings: Settings, storage: FileStorage, make_prompts: MakePrompts, until: Until, tmp_path: Path
) -> None:
    run = Run.create(storage, "run", {"target.model": "tiny", "sampling.max_tokens": 64, "sampling.seed": 7}, {})
    prompts = [replace(prompt, source="questions") for prompt in make_prompts(60)]
    with FakeServer(model="tiny", latency_s=0.05) as one, FakeServer(model="tiny") as other:
        settings = changed(settings, worker__servers=[one.url, f"{other.url}/v1/"], worker__concurrency=4)
        names = enqueue(settings, run, prompts)

        with WorkerProcess(settings, tmp_path / "worker.log") as worker:
            until(lambda: run.done() == names, what="all batches done")
            worker.send(signal.SIGTERM)
            code = worker.wait()

        asked = [server.stats()["rows"] for server in (one, other)]

    samples = [sample for name in names for sample in run.read_samples(name)]
    assert code == 0
    assert [sample.row_key for sample in samples] == [prompt.row_key for prompt in prompts]
    assert {sample.server for sample in samples} == {one.url, other.url}
    assert {sample.source for sample in samples} == {"questions"}
    # Each server's canary asks one prompt more.
    assert sum(row["requests"] for rows in asked for row in rows.values()) <= len(prompts) + 2 * 2
    assert all(row["requests"] for rows in asked for row in rows.values())
    assert all(sample.ids_source == "engine" and sample.ids_match_usage for sample in samples)
    assert all(sample.dialect and sample.worker and sample.seconds > 0 and sample.reasoning for sample in samples)
    assert Accountant(run).account().holds
    table = pq.read_table(storage.root / "run/samples" / f"{names[0]}.parquet")
    assert table.schema.names == SAMPLE_SCHEMA.names
    assert list(run.partials()) == []


def test_while_it_works_the_status_tells_when_it_will_be_finished(
    settings: Settings, storage: FileStorage, make_prompts: MakePrompts, until: Until, tmp_path: Path
) -> None:
    run = Run.create(storage, "run", {"target.model": "tiny", "sampling.max_tokens": 64}, {})
    accountant = Accountant(run)
    assert collect(settings, accountant)["eta"]["rows_left"] == 0
    with FakeServer(model="tiny", latency_s=0.2) as server:
        settings = changed(settings, worker__servers=[server.url], worker__concurrency=4)
        enqueue(
            settings, run, [replace(prompt, source="ab"[len(prompt.prompt_id) % 2]) for prompt in make_prompts(400)]
        )
        assert collect(settings, accountant)["eta"]["why"] == "no worker is there"

        with WorkerProcess(settings, tmp_path / "worker.log"):
            until(lambda: collect(settings, accountant)["eta"]["seconds"], what="an estimate")
            told = collect(settings, accountant)["eta"]

    assert 0 < told["rows_left"] <= 400
    assert told["tokens_left"] == pytest.approx(told["rows_left"] * told["mean_tokens"], rel=0.2)
    assert 0.5 < told["seconds"] * told["capacity_tokens_per_s"] / told["tokens_left"] < 2


@pytest.mark.parametrize(
    ("shape", "dialect", "source"),
    [
        ("sglang", "auto", "engine"),
        ("sglang", "sglang-native", "engine"),
        ("llamacpp", "auto", "retokenized"),
        ("llamacpp", "llamacpp-native", "engine"),
        ("vllm-0.10", "auto", "retokenized"),
    ],
)
def test_rows_of_every_kind_of_server_have_ids_that_are_as_many_as_it_counts(
    settings: Settings,
    storage: FileStorage,
    make_prompts: MakePrompts,
    until: Until,
    tmp_path: Path,
    shape: str,
    dialect: str,
    source: str,
) -> None:
    run = Run.create(storage, "run", {"target.model": "tiny", "sampling.max_tokens": 200}, {})
    with FakeServer(model="tiny", shape=shape, tokenizer=str(TINY_TARGET)) as server:
        settings = changed(
            settings, worker__servers=[server.url], worker__dialect=dialect, target__path=str(TINY_TARGET)
        )
        names = enqueue(settings, run, make_prompts(6))

        with WorkerProcess(settings, tmp_path / "worker.log"):
            until(lambda: run.done() == names, what="all batches done")

    samples = [sample for name in names for sample in run.read_samples(name)]
    assert {sample.outcome for sample in samples} <= {"ok", "truncated"}
    assert {sample.ids_source for sample in samples} == {source}
    assert all(sample.ids_match_usage for sample in samples)
    assert all(len(sample.prompt_token_ids) == sample.prompt_tokens for sample in samples)
    assert all(sample.reasoning and "<think>" not in (sample.content or "") for sample in samples)


def test_nothing_is_consumed_before_a_server_is_ready(
    settings: Settings, run: Run, make_prompts: MakePrompts, until: Until, tmp_path: Path
) -> None:
    redis = connect(settings)
    with FakeServer(model="tiny", ready=False) as server:
        settings = changed(settings, worker__servers=[server.url], worker__probe_interval_s=0.1)
        names = enqueue(settings, run, make_prompts(16))

        with WorkerProcess(settings, tmp_path / "worker.log"):
            until(lambda: [report.state for report in live.read(redis)] == ["waiting"], what="a waiting worker")
            waiting = queued(redis, "tiny")
            server.change(ready=True)
            until(lambda: run.done() == names, what="all batches done")

    assert waiting == len(names)


def test_a_worker_whose_only_server_went_away_takes_nothing_more(
    settings: Settings, run: Run, make_prompts: MakePrompts, until: Until, tmp_path: Path
) -> None:
    redis = connect(settings)
    with FakeServer(model="tiny") as server:
        settings = changed(settings, worker__servers=[server.url], worker__probe_interval_s=0.1)
        first = enqueue(settings, run, make_prompts(8))
        with WorkerProcess(settings, tmp_path / "worker.log") as worker:
            until(lambda: run.done() == first, what="the first batch")
            server.change(alive=False)
            until(lambda: worker.said("waiting for server"), what="the server to be missed")

            second = enqueue(settings, run, make_prompts(80, start=8))
            until(lambda: queued(redis, "tiny") == len(second))
            until(lambda: [report.state for report in live.read(redis)] == ["waiting"], what="a waiting worker")
            held = len(Claims(redis, run.run_id, settings.claims, "test").held())
            server.change(alive=True)
            until(lambda: run.done() == first + second, what="all batches done")

    assert held == 0
    assert Accountant(run).account().holds


def test_held_batches_follow_the_low_watermark(
    settings: Settings, run: Run, make_prompts: MakePrompts, until: Until, tmp_path: Path
) -> None:
    redis = connect(settings)
    with FakeServer(model="tiny") as server:
        server.fault("hang", after=1 + 8)  # the canary and the first batch are answered
        settings = changed(settings, worker__servers=[server.url], worker__concurrency=4)
        names = enqueue(settings, run, make_prompts(80), batch_size=8)

        def settled() -> live.WorkerReport | None:
            [report] = live.read(redis) or [None]
            is_full = report and report.rows_in_flight == 4 and report.rows_waiting >= 16
            return report if is_full and run.done() == names[:1] and queued(redis, "tiny") == 6 else None

        with WorkerProcess(settings, tmp_path / "worker.log") as worker:
            report = until(settled, what="a worker that has what it wants")
            taken = len(worker.said("batch taken"))

    # A watermark of 2 batches: with 4 rows in flight and 12 waiting the next 8 are taken, with 20 none.
    assert (report.batches_held, report.rows_waiting, taken) == (3, 20, 4)


def test_the_retry_queue_is_consumed_first(
    settings: Settings, run: Run, make_prompts: MakePrompts, until: Until, tmp_path: Path
) -> None:
    redis = connect(settings)
    with FakeServer(model="tiny") as server:
        server.fault("hang", after=1)
        settings = changed(settings, worker__servers=[server.url], worker__concurrency=1, worker__watermark_batches=1)
        names = enqueue(settings, run, make_prompts(40), batch_size=4)
        last = redis.lpop(keys(generate_queue("tiny"))[1])  # the newest message: BRPOP takes from the other end
        assert last
        redis.lpush(keys(retry_queue("tiny"))[1], last)

        with WorkerProcess(settings, tmp_path / "worker.log"):
            held = Claims(redis, run.run_id, settings.claims, "test").held
            until(lambda: len(held()) == 2, what="one batch whose row is in flight, and one that waits")

    assert held() == {names[-1], names[0]}


def test_a_row_that_was_split_off_is_found_in_its_batch_s_partials(
    settings: Settings,
    run: Run,
    make_prompts: MakePrompts,
    make_sample: Callable[..., Any],
    until: Until,
    tmp_path: Path,
) -> None:
    prompts = make_prompts(2)
    with FakeServer(model="tiny") as server:
        settings = changed(settings, worker__servers=[server.url], claims__reconcile_s=0.2, claims__grace_s=0.1)
        run.write_prompts("train-000000", prompts)
        run.split("train-000000", 2)
        run.seal({"prompts": 2})
        run.write_partial("gone", 0, [make_sample(prompts[1], "train-000000", content="from before")])

        with WorkerProcess(settings, tmp_path / "worker.log"):
            parts = ["train-000000.0000", "train-000000.0001"]
            until(lambda: run.done() == parts, what="both rows")
            until(lambda: not list(run.partials()), what="the partial to be deleted")

    assert run.read_samples(parts[0])[0].content != "from before"
    assert [(s.content, s.batch) for s in run.read_samples(parts[1])] == [("from before", parts[1])]
    assert Accountant(run).account().holds


def test_flower_sees_how_far_a_batch_is(
    settings: Settings, run: Run, make_prompts: MakePrompts, until: Until, tmp_path: Path
) -> None:
    seen: list[dict[str, Any]] = []
    app = make_app(settings)
    with FakeServer(model="tiny", latency_s=0.5) as server, app.connection_for_read() as connection:
        settings = changed(settings, worker__servers=[server.url], worker__concurrency=1)
        enqueue(settings, run, make_prompts(16), batch_size=16)
        receiver = app.events.Receiver(connection, handlers={"task-progress": seen.append})

        with WorkerProcess(settings, tmp_path / "worker.log"):
            listening = threading.Thread(target=receiver.capture, kwargs={"timeout": 30})
            listening.start()
            until(lambda: seen, what="a progress event")
            receiver.should_stop = True  # it ends at the next event
            listening.join()

    assert "/16 prompts, " in seen[0]["result"]


def test_sighup_adds_a_server_and_changes_the_limit(
    settings: Settings, run: Run, make_prompts: MakePrompts, until: Until, tmp_path: Path
) -> None:
    redis = connect(settings)
    config = tmp_path / "draftfleet.toml"

    def write(servers: list[str], concurrency: int) -> None:
        assert settings.queue.url is not None
        sections = {
            "queue": {"url": settings.queue.url.get_secret_value()},
            "storage": {"url": settings.storage.url},
            "target": {"model": "tiny"},
            "worker": {"servers": servers, "concurrency": concurrency, "probe_interval_s": 0.1},
        }
        lines = [
            f"[{name}]\n" + "".join(f"{k} = {json.dumps(v)}\n" for k, v in s.items()) for name, s in sections.items()
        ]
        config.write_text("\n".join(lines))

    with FakeServer(model="tiny", latency_s=0.1) as one, FakeServer(model="tiny", latency_s=0.1) as other:
        write([one.url], 1)
        with WorkerProcess(settings, tmp_path / "worker.log", config=config) as worker:
            until(lambda: live.read(redis), what="a report")
            write([one.url, other.url], 3)
            worker.send(signal.SIGHUP)
            until(lambda: len(live.read(redis)[0].servers) == 2, what="the second server")
            names = enqueue(settings, run, make_prompts(40))
            until(lambda: run.done() == names, what="all batches done")
            stats = [server.stats() for server in (one, other)]

    assert [stat["peak_in_flight"] for stat in stats] == [3, 3]
