"""Small parts of the node: its lock, its guard, partials, holdings, seeds, and what it says of itself."""

from __future__ import annotations

import errno
import json
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace as Namespace
from typing import Any

import pytest
from jinja2 import TemplateError

from draftfleet import live
from draftfleet.claims import Claims, Holding, Renewal, Taken
from draftfleet.embedded import Embedded
from draftfleet.errors import RunBusy, RunError, StorageUnwritable
from draftfleet.live import RunReport, WorkerReport
from draftfleet.names import batch_id
from draftfleet.queue import connect
from draftfleet.records import Prompt, Sample
from draftfleet.runs import Run
from draftfleet.settings import Sampling, Settings
from draftfleet.storage import FileStorage
from draftfleet.tokens import TargetTokenizer
from workers.batch import Batch, Content
from workers.client import Client
from workers.generate import Generator, row_seed
from workers.guard import Guard
from workers.holdings import Holdings
from workers.node import Node
from workers.node_lock import NodeLock
from workers.partials import MOST_FILES, Partials

MakePrompts = Callable[..., list[Prompt]]
MakeSample = Callable[..., Sample]


class Roomy(FileStorage):
    """With as much room as the test says."""

    free = 0

    def free_bytes(self) -> int:
        return self.free


def test_a_node_pauses_before_the_folder_is_full_and_goes_on_once_there_is_room(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    changes: list[bool] = []
    guard, storage = Guard(lambda: changes.append(guard.is_blocked)), Roomy(tmp_path)

    for storage.free in (2_000_000_000, 900_000_000, 1_050_000_000):  # too little more is not enough
        guard.watch(storage, 1)
    assert changes == [True]
    assert "has 1.05 GB left, and storage.min_free_gb = 1: make room" in guard.reason
    assert "worker paused" in caplog.text
    assert guard.run("committing", lambda: "written") == "written"

    storage.free = 1_200_000_000
    guard.watch(storage, 1)
    assert (changes, guard.reason) == ([True, False], "")


def test_a_folder_without_a_limit_or_a_store_without_a_size_never_pauses(tmp_path: Path) -> None:
    guard, storage = Guard(lambda: None), Roomy(tmp_path)
    guard.watch(storage, 0)

    storage.free = None  # pyright: ignore[reportAttributeAccessIssue]
    guard.watch(storage, 1)

    assert not guard.is_blocked


def test_a_partial_of_which_no_row_can_be_read_is_deleted_with_the_others(run: Run) -> None:
    run.storage.put("run/partial/other-000000.jsonl", b'{"torn')
    partials = Partials(run, "p")
    assert partials.earlier("train-000000", {"x"}) == {}

    assert partials.clean("train-000000") == 1

    assert run.partials() == []


def test_a_lock_is_refused_while_held_and_free_after(tmp_path: Path) -> None:
    with NodeLock(tmp_path) as first:
        first.take("http://a")
        with NodeLock(tmp_path) as second:
            second.take("http://b")
            with pytest.raises(RunBusy, match=r"http://a already has a worker on this node: pid \d+, started"):
                second.take("http://a")
            first.keep([])
            second.take("http://a")


def test_a_lock_file_left_behind_is_no_lock(tmp_path: Path) -> None:
    with NodeLock(tmp_path) as lock:
        lock.take("http://a")
    (left,) = tmp_path.iterdir()
    left.write_text(json.dumps({"pid": 1, "started_at": 0, "url": "http://a"}))

    with NodeLock(tmp_path) as lock:
        lock.take("http://a")


def test_a_lock_is_not_written_where_another_user_may_have_put_something(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "locks").symlink_to(tmp_path / "elsewhere")

    with NodeLock(tmp_path / "locks") as lock, pytest.raises(RunError, match="no folder of this user"):
        lock.take("http://a")


def test_a_blocked_folder_is_tried_until_it_works_and_the_pause_is_told() -> None:
    changes: list[bool] = []
    guard = Guard(lambda: changes.append(guard.is_blocked))
    failures = iter([StorageUnwritable("full"), OSError(errno.EIO, "broken")])

    def action() -> str:
        if (error := next(failures, None)) is not None:
            raise error
        return "written"

    assert guard.run("writing", action) == "written"
    assert changes == [True, False]


def test_only_being_told_to_stop_ends_the_wait_for_a_folder() -> None:
    blocked = threading.Event()
    guard = Guard(blocked.set)
    caught: list[BaseException] = []

    def write() -> None:
        def action() -> None:
            raise StorageUnwritable("full")

        try:
            guard.run("writing", action)
        except StorageUnwritable as error:
            caught.append(error)

    writer = threading.Thread(target=write)
    writer.start()
    assert blocked.wait(10)
    guard.give_up()
    writer.join(10)

    assert len(caught) == 1
    assert not guard.is_blocked


def test_a_pool_is_told_what_holds_when_it_hears_it_not_what_held_when_it_was_said() -> None:
    said: list[Callable[[], object]] = []
    heard: list[bool] = []
    node = Namespace(
        loop=Namespace(call=said.append), pool=Namespace(pause=heard.append), guard=Namespace(is_blocked=True)
    )

    Node._storage_changed(node)  # pyright: ignore[reportArgumentType]
    node.guard.is_blocked = False  # another thread reached the storage before the loop came to it
    said[0]()

    assert heard == [False]


def test_a_missing_file_is_no_fault_of_the_folder() -> None:
    def action() -> None:
        raise FileNotFoundError

    with pytest.raises(FileNotFoundError):
        Guard(lambda: None).run("reading", action)


def test_a_partial_goes_when_the_last_of_its_batches_is_done(
    run: Run, make_prompts: MakePrompts, make_sample: MakeSample
) -> None:
    first, second = make_prompts(2)
    rows = [make_sample(first, "train-000000"), make_sample(second, "train-000001")]
    mine = Partials(run, "me")
    mine.write(rows)

    run.commit("train-000000", rows[:1])
    after_first = mine.clean("train-000000")
    run.commit("train-000001", rows[1:])
    after_second = mine.clean("train-000001")

    assert (after_first, after_second) == (0, 1)
    assert list(run.partials()) == []


def test_partials_of_two_attempts_give_each_row_once_and_the_better_one(
    run: Run, make_prompts: MakePrompts, make_sample: MakeSample
) -> None:
    one, other = make_prompts(2)
    run.write_partial("a", 0, [make_sample(one, outcome="truncated"), make_sample(other, content="a")])
    run.write_partial("b", 0, [make_sample(one, outcome="ok"), make_sample(other, content="b")])

    found = Partials(run, "me").earlier("train-000000", {one.row_key, other.row_key})

    assert found[one.row_key].outcome == "ok"
    assert found[other.row_key].content == "a"


def test_rows_of_batches_that_others_work_on_are_read_once_and_not_kept(
    run: Run, make_prompts: MakePrompts, make_sample: MakeSample, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, others = make_prompts(2)
    file = run.write_partial("a", 0, [make_sample(mine, "train-000000")])
    elsewhere = run.write_partial("b", 0, [make_sample(others, "train-000001")])
    reads: list[str] = []
    read = run.read_partial
    monkeypatch.setattr(run, "read_partial", lambda name: (reads.append(name), read(name))[1])
    partials = Partials(run, "me")

    found = [partials.earlier("train-000000", {mine.row_key}) for _ in range(3)]

    assert [list(one) for one in found] == [[mine.row_key]] * 3
    assert (reads.count(file), reads.count(elsewhere)) == (3, 1)
    assert "train-000001" not in str(found)


def test_a_process_that_has_written_many_partials_puts_what_is_still_wanted_into_one(
    run: Run, make_prompts: MakePrompts, make_sample: MakeSample
) -> None:
    partials = Partials(run, "p")
    prompts = make_prompts(MOST_FILES + 1)
    done, held = batch_id("train", 0), batch_id("train", 1)
    run.commit(done, [make_sample(prompts[0], batch=done)])

    partials.write([make_sample(prompts[0], batch=done)])
    for prompt in prompts[1:]:
        partials.write([make_sample(prompt, batch=held)])

    [merged] = run.partials()
    keys = {prompt.row_key for prompt in prompts[1:]}
    assert {sample.row_key for sample in run.read_partial(merged)} == keys
    assert partials.earlier(held, keys).keys() == Partials(run, "q").earlier(held, keys).keys() == keys
    run.commit(held, [make_sample(prompt, batch=held) for prompt in prompts[1:]])
    assert partials.clean(held) == 1
    assert list(run.partials()) == []


def test_a_torn_partial_gives_its_whole_rows(run: Run, make_prompts: MakePrompts, make_sample: MakeSample) -> None:
    one, other = make_prompts(2)
    name = run.write_partial("a", 0, [make_sample(one), make_sample(other)])
    path = f"{run.name}/partial/{name}"
    whole = run.storage.read(path)
    run.storage.put(path, whole[: int(len(whole) * 0.8)])

    found = Partials(run, "me").earlier("train-000000", {one.row_key, other.row_key})

    assert list(found) == [one.row_key]


def test_only_rows_saved_under_this_claim_count_as_its_progress(
    run: Run, settings: Settings, make_prompts: MakePrompts, make_sample: MakeSample
) -> None:
    prompts = make_prompts(3)
    batch = _batch(run, settings, prompts, earlier={prompts[0].row_key: make_sample(prompts[0])})
    holdings = Holdings(Guard(lambda: None), lambda _: None)
    holdings.hold(batch, Partials(run, "me"))

    before = batch.holding.saved_rows
    batch.finish(make_sample(prompts[1]))
    saved = [holdings.checkpoint(), holdings.checkpoint()]

    assert before == 0
    assert saved == [1, 0]
    assert batch.holding.saved_rows == 1


def test_a_claim_that_redis_forgot_is_taken_again_and_one_that_another_has_is_lost(
    run: Run, settings: Settings, make_prompts: MakePrompts
) -> None:
    lost: list[Batch] = []
    redis = connect(settings)
    batch = _batch(run, settings, make_prompts(2))
    holdings = Holdings(Guard(lambda: None), lost.append)
    holdings.hold(batch, Partials(run, "me"))
    other = Claims(redis, run.run_id, settings.claims, "other")

    redis.flushall()
    holdings.renew()
    holder = other.holder(batch.name)
    redis.flushall()
    other.take(batch.name)
    holdings.renew()

    assert holder == "me"
    assert lost == [batch]


def test_a_batch_that_is_to_be_given_back_keeps_its_claim_until_its_rows_are_saved(
    run: Run, settings: Settings, make_prompts: MakePrompts
) -> None:
    batch = _batch(run, settings, make_prompts(2))
    holdings = Holdings(Guard(lambda: None), lambda _: None)
    holdings.hold(batch, Partials(run, "me"))
    redis = connect(settings)

    batch.stop("paused")
    redis.flushall()
    holdings.renew()

    assert Claims(redis, run.run_id, settings.claims, "other").holder(batch.name) == "me"


def test_a_renewal_that_comes_after_a_batch_was_taken_anew_says_nothing_of_the_new_claim(
    run: Run, settings: Settings, make_prompts: MakePrompts
) -> None:
    lost: list[Batch] = []
    first = _batch(run, settings, make_prompts(2))
    holdings = Holdings(Guard(lambda: None), lost.append)
    holdings.hold(first, Partials(run, "me"))

    def renew_late(held: Mapping[str, Holding]) -> dict[str, Renewal]:
        first.claims.release(first.name, first.token)
        holdings.free(first.key)
        holdings.hold(_batch(run, settings, make_prompts(2)), Partials(run, "me"))
        return renew(held)

    renew, first.claims.renew = first.claims.renew, renew_late
    holdings.renew()

    assert lost == []


def test_a_batch_that_is_put_away_is_not_one_that_is_coming(
    settings: Settings, redis_server: Embedded, run: Run, make_prompts: MakePrompts
) -> None:
    claims = Claims(connect(settings), run.run_id, settings.claims, "worker")
    taken = claims.take("train-000000")
    assert isinstance(taken, Taken)
    batch = Batch("train-000000", run, Content.of(run), claims, taken.token, 1, "task")
    holdings = Holdings(Guard(lambda: None), lambda _: None)

    seen = [holdings.num_settling]
    for step in (
        lambda: holdings.reserve(batch.key),
        lambda: holdings.hold(batch, Partials(run, "p")),
        lambda: holdings.drop(batch.key),
        lambda: holdings.free(batch.key),
    ):
        step()
        seen.append(holdings.num_settling)

    assert seen == [0, 0, 0, 1, 0]


def test_a_row_s_seed_is_its_own_and_stays_the_same() -> None:
    seeds = {row_seed(1, f"{number:032x}-0-0") for number in range(1000)}

    assert len(seeds) == 1000
    assert all(seed is not None and 0 <= seed < 2**31 for seed in seeds)
    assert row_seed(1, "a") == row_seed(1, "a") != row_seed(2, "a")
    assert row_seed(None, "a") is None


def test_a_prompt_that_the_template_refuses_is_left_to_the_server_to_judge(
    run: Run, settings: Settings, make_prompts: MakePrompts
) -> None:
    class Refusing(TargetTokenizer):
        def __init__(self) -> None: ...

        def prompt_ids(self, messages: Any, *_: Any, **__: Any) -> list[int]:
            if "0?" in messages[0]["content"]:
                raise TemplateError("conversation roles must alternate")
            return [1, 2, 3]

    generator = Generator(Client.__new__(Client), Refusing(), context_tokens=None, worker="me")

    rows = generator.rows(_batch(run, settings, make_prompts(2)))

    assert [row.prompt_tokens for row in rows] == [None, 3]


def test_a_run_s_content_decides_what_is_asked_not_the_worker_s_settings(run: Run) -> None:
    content = Content.of(run)

    assert content == Content("tiny", Sampling(max_tokens=64))


@pytest.mark.parametrize(
    "content", [{"target.model": "tiny", "sampling.unheard_of": 1}, {"sampling.max_tokens": 64}], ids=str
)
def test_a_run_of_another_version_is_refused_with_both_versions(storage: FileStorage, content: dict[str, Any]) -> None:
    with pytest.raises(RunError, match=r"made by draftfleet [0-9.]+ and cannot be read by [0-9.]+"):
        Content.of(Run.create(storage, "other", content, {}))


def test_a_report_is_read_back_whole_and_one_that_cannot_be_read_is_left_out(
    settings: Settings, redis_server: Embedded
) -> None:
    redis = connect(settings)
    report = WorkerReport(
        process="host-1-abc", host="host", pid=1, started_at=1.5, state="working", runs=[RunReport(run="r", run_id="i")]
    )
    redis.set("draftfleet:live:other-version", '{"process": 3}')

    live.publish(redis, report)

    assert live.read(redis) == [report]
    assert 0 < redis.ttl("draftfleet:live:host-1-abc") <= live.LIVE_S
    live.withdraw(redis, report.process)
    assert live.read(redis) == []


def _batch(run: Run, settings: Settings, prompts: list[Prompt], earlier: dict[str, Sample] | None = None) -> Batch:
    claims = Claims(connect(settings), run.run_id, settings.claims, "me")
    taken = claims.take("train-000000")
    assert isinstance(taken, Taken)
    batch = Batch("train-000000", run, Content.of(run), claims, taken.token, taken.attempt, "task")
    batch.open(prompts, earlier or {})
    return batch
