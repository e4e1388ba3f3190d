"""`produce` on real files, a real Redis and real processes that are killed."""

from __future__ import annotations

import base64
import errno
import gzip
import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import redis

from draftfleet.accounting import Accountant
from draftfleet.embedded import Embedded
from draftfleet.errors import DataError, QueueError, RunConflict, RunMissing, SettingsError, StorageUnwritable
from draftfleet.queue import connect, generate_queue, keys, retry_queue
from draftfleet.runs import Run
from draftfleet.settings import Settings, load
from draftfleet.storage import FileStorage
from producer.produce import produce, without_secrets

Until = Callable[..., Any]
Configure = Callable[..., Settings]
MODEL = "tiny"
TARGET = Path(__file__).parents[2] / "examples" / "tiny-target"

PRODUCE = """
import json, sys
from draftfleet.errors import RunBusy
from draftfleet.settings import load
from producer.produce import produce
try:
    print(produce(load(flags=json.loads(sys.argv[1])), progress=False).to_json())
except RunBusy as error:
    sys.exit(f"busy: {error}")
"""


@pytest.fixture
def flags(redis_server: Embedded, storage: FileStorage) -> dict[str, Any]:
    return {
        "queue.url": redis_server.url,
        "storage.url": storage.url,
        "target.model": MODEL,
        "run": "run",
        "producer.batch_size": 8,
        "producer.heldout": 0.1,
    }


@pytest.fixture
def configure(flags: dict[str, Any]) -> Configure:
    def make(data: object, **changes: Any) -> Settings:
        return load(
            flags={**flags, "producer.data": str(data), **{k.replace("__", "."): v for k, v in changes.items()}}
        )

    return make


@pytest.fixture
def client(redis_server: Embedded, settings: Settings) -> Iterator[redis.Redis]:
    with connect(settings) as client:
        yield client


def in_thread(work: Callable[[], Any]) -> Future[Any]:
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def questions(count: int, start: int = 0) -> list[str]:
    return [
        json.dumps({"prompt": f"What is {number} times {number}?"}) + "\n" for number in range(start, start + count)
    ]


def write(path: Path, lines: list[str]) -> Path:
    path.write_text("".join(lines))
    return path


def contents(run: Run) -> Counter[str]:
    """How often the run holds each text."""
    return Counter(str(prompt.messages[-1]["content"]) for batch in run.batches() for prompt in run.read_prompts(batch))


def texts(lines: list[str]) -> Counter[str]:
    return Counter(json.loads(line)["prompt"] for line in lines)


def queued(client: redis.Redis) -> list[str]:
    """Batches in the queue, the first to be consumed first."""
    lists = [*reversed(keys(generate_queue(MODEL))), *reversed(keys(retry_queue(MODEL)))]
    raw = [one for key in lists for one in client.lrange(key, 0, -1)]
    return [json.loads(base64.b64decode(json.loads(one)["body"]))[0][0]["batch"] for one in reversed(raw)]


def test_a_data_set_becomes_shards_references_and_a_sealed_run(
    configure: Configure, client: redis.Redis, storage: FileStorage, tmp_path: Path
) -> None:
    good = questions(100)
    bad = ["{\n", '{"prompt": 7}\n', '{"prompt": ""}\n']
    data = tmp_path / "data.jsonl.gz"
    data.write_bytes(gzip.compress("".join([*good[:50], *bad, "\n", *good[40:]]).encode()))

    report = produce(configure(data), progress=False)

    run = Run.open(storage, "run")
    assert contents(run) == texts(good)
    assert sorted(queued(client)) == run.batches()
    assert (report.lines, report.prompts, report.new, report.already) == (113, 100, 100, 0)
    assert (report.duplicates, report.malformed, report.rejected) == (10, 2, 1)
    assert report.rejected_for == {"empty prompt": 1}
    assert report.train + report.heldout == report.run_prompts == 100
    assert 0 < report.heldout < 50
    assert report.batches == len(run.batches())
    assert json.loads(report.to_json())["run_id"] == run.run_id
    assert (Accountant(run).account().expected, Accountant(run).account().pending) == (100, 100)


def test_run_json_pins_what_is_asked_and_says_where_it_came_from(
    configure: Configure, storage: FileStorage, tmp_path: Path
) -> None:
    data = write(tmp_path / "data.jsonl", questions(3))

    produce(configure(data, target__path=str(TARGET), sampling__temperature=0.7), progress=False)

    info = Run.open(storage, "run").info
    assert info.content["target.model"] == MODEL
    assert len(info.content["target.fingerprint"]) == 32
    assert info.content["sampling.temperature"] == 0.7
    assert info.content["producer.batch_size"] == 8
    assert not [key for key in info.content if key.startswith(("storage", "queue", "worker", "producer.data"))]
    assert info.provenance["data.source"]["path"] == str(data)
    assert len(info.provenance["data.source"]["sha256"]) == 64


def test_the_first_batch_is_in_the_queue_while_the_data_set_is_still_being_written(
    configure: Configure, client: redis.Redis, storage: FileStorage, tmp_path: Path, until: Until
) -> None:
    pipe = tmp_path / "data.jsonl"
    os.mkfifo(pipe)
    lines = questions(30)
    produce(configure(write(tmp_path / "earlier.jsonl", lines[:1])), progress=False)
    assert Run.open(storage, "run").sealed() is not None
    producing = in_thread(lambda: produce(configure(pipe), progress=False))

    with pipe.open("w") as file:
        file.writelines(lines[:20])
        file.flush()
        until(lambda: len(queued(client)) > 1, what="the first batch in the queue")
        assert not producing.done()
        assert Run.open(storage, "run").sealed() is None
        file.writelines(lines[20:])

    assert producing.result(60).new == 29
    assert Run.open(storage, "run").sealed() is not None
    assert contents(Run.open(storage, "run")) == texts(lines)


def test_producing_again_adds_only_what_is_new_and_numbers_go_on(
    configure: Configure, client: redis.Redis, storage: FileStorage, tmp_path: Path
) -> None:
    first, all_of_it = questions(50), questions(80)
    produce(configure(write(tmp_path / "first.jsonl", first)), progress=False)
    run = Run.open(storage, "run")
    before = {batch: run.read_prompts(batch) for batch in run.batches()}

    report = produce(configure(write(tmp_path / "second.jsonl", all_of_it[::-1])), progress=False)
    again = produce(configure(tmp_path / "second.jsonl"), progress=False)

    assert (report.prompts, report.new, report.already, report.run_prompts) == (80, 30, 50, 80)
    assert (again.new, again.already, again.batches) == (0, 80, 0)
    assert {batch: run.read_prompts(batch) for batch in before} == before
    assert contents(run) == texts(all_of_it)
    assert sorted(queued(client)) == run.batches()
    assert Accountant(run).account().expected == 80


def test_other_content_settings_are_refused_one_by_one_and_nothing_is_touched(
    configure: Configure, storage: FileStorage, tmp_path: Path
) -> None:
    data = write(tmp_path / "data.jsonl", questions(10))
    produce(configure(data), progress=False)
    run = Run.open(storage, "run")
    sealed, batches = run.sealed(), run.batches()

    with pytest.raises(RunConflict) as caught:
        produce(
            configure(data, producer__batch_size=9, sampling__max_tokens=7, sampling__extra_body={"top_k": 5}),
            progress=False,
        )

    assert "producer.batch_size: the run has 8, now 9" in str(caught.value)
    assert "sampling.max_tokens: the run has 8192, now 7" in str(caught.value)
    assert "sampling.extra_body: the run has {}, now {'top_k': 5}" in str(caught.value)
    assert (run.sealed(), run.batches()) == (sealed, batches)


def test_a_node_without_the_tokenizer_may_go_on_with_a_run_that_has_its_fingerprint(
    configure: Configure, storage: FileStorage, tmp_path: Path
) -> None:
    data = write(tmp_path / "data.jsonl", questions(10))
    produce(configure(data, target__path=str(TARGET)), progress=False)
    pinned = Run.open(storage, "run").info.content["target.fingerprint"]

    for path in ("", "nobody/nothing"):
        assert produce(configure(data, target__path=path), progress=False).already == 10

    assert Run.open(storage, "run").info.content["target.fingerprint"] == pinned


@pytest.mark.parametrize("path", ["/nowhere/target", "./nowhere", "../nowhere/target", "~/nowhere/target"])
def test_a_path_of_a_target_that_is_not_there_is_refused_and_leaves_no_run(
    configure: Configure, storage: FileStorage, tmp_path: Path, path: str
) -> None:
    data = write(tmp_path / "data.jsonl", questions(10))

    with pytest.raises(SettingsError, match=re.escape(f"target.path = {path} is not there")):
        produce(configure(data, target__path=path), progress=False)

    with pytest.raises(RunMissing):
        Run.open(storage, "run")


def test_a_tokenizer_that_the_run_cannot_be_compared_with_is_said(
    configure: Configure, storage: FileStorage, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = write(tmp_path / "data.jsonl", questions(10))
    produce(configure(data), progress=False)
    assert caplog.messages == []

    produce(configure(data, target__path=str(TARGET)), progress=False)

    assert [message.partition(" run=")[0] for message in caplog.messages] == ["target fingerprint not compared"]
    assert Run.open(storage, "run").info.content["target.fingerprint"] is None


def test_wrong_data_leaves_no_run_behind_and_an_existing_one_as_it_was(
    configure: Configure, storage: FileStorage, tmp_path: Path
) -> None:
    useless = write(tmp_path / "useless.jsonl", ['{"text": "Why?"}\n'])
    with pytest.raises(DataError, match="has none of the columns"):
        produce(configure(useless), progress=False)
    with pytest.raises(RunMissing):
        Run.open(storage, "run")

    produce(configure(write(tmp_path / "data.jsonl", questions(10))), progress=False)
    run = Run.open(storage, "run")
    sealed = run.sealed()
    with pytest.raises(DataError, match="has none of the columns"):
        produce(configure(useless), progress=False)

    assert run.sealed() == sealed
    assert produce(configure(tmp_path / "data.jsonl"), progress=False).already == 10


def test_a_file_that_breaks_off_leaves_the_run_open_and_the_whole_file_completes_it(
    configure: Configure, client: redis.Redis, storage: FileStorage, tmp_path: Path
) -> None:
    lines = questions(3000)
    data = tmp_path / "data.jsonl.gz"
    whole = gzip.compress("".join(lines).encode())
    data.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"cannot be read after line \d+"):
        produce(configure(data), progress=False)
    run = Run.open(storage, "run")
    assert run.sealed() is None
    assert 0 < len(run.batches()) < 375
    assert sorted(queued(client)) == run.batches()

    data.write_bytes(whole)
    produce(configure(data), progress=False)

    assert contents(run) == texts(lines)
    assert Accountant(run).account().expected == 3000


def test_a_storage_that_gets_full_is_told_and_the_next_producer_completes_the_run(
    configure: Configure,
    client: redis.Redis,
    storage: FileStorage,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines = questions(200)
    data = write(tmp_path / "data.jsonl", lines)
    sync = os.fsync

    def sync_while_there_is_room(file: int) -> None:
        if len(list(storage.list("run/prompts"))) >= 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(file)

    with monkeypatch.context() as full:
        full.setattr(os, "fsync", sync_while_there_is_room)
        with pytest.raises(StorageUnwritable, match="No space left on device"):
            produce(configure(data), progress=False)
    run = Run.open(storage, "run")
    assert run.sealed() is None

    report = produce(configure(data), progress=False)

    assert (report.already > 0, report.already + report.new) == (True, 200)
    assert contents(run) == texts(lines)
    assert set(queued(client)) == set(run.batches())


def test_a_producer_killed_in_mid_run_loses_and_doubles_nothing(
    flags: dict[str, Any], configure: Configure, client: redis.Redis, storage: FileStorage, tmp_path: Path, until: Until
) -> None:
    lines = questions(400)
    pipe = tmp_path / "pipe.jsonl"
    os.mkfifo(pipe)
    child = subprocess.Popen([sys.executable, "-c", PRODUCE, json.dumps({**flags, "producer.data": str(pipe)})])
    with pipe.open("w") as file:
        file.writelines(lines[:203])
        file.flush()
        until(lambda: any(storage.list("run/prompts")) and len(queued(client)) >= 5, what="batches of the child")
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
    run = Run.open(storage, "run")
    assert run.sealed() is None
    assert 0 < contents(run).total() < 204

    report = produce(configure(write(tmp_path / "data.jsonl", lines)), progress=False)

    assert contents(run) == texts(lines)
    assert report.new + report.already == report.run_prompts == 400
    assert set(queued(client)) == set(run.batches())
    assert Accountant(run).account().expected == 400


def test_batches_that_a_crash_left_unpublished_are_published_by_the_next_producer(
    configure: Configure, client: redis.Redis, storage: FileStorage, tmp_path: Path
) -> None:
    data = write(tmp_path / "data.jsonl", questions(50))
    produce(configure(data), progress=False)
    run = Run.open(storage, "run")
    client.flushall()  # as if it had died between the shards and the references

    produce(configure(data), progress=False)

    assert sorted(queued(client)) == run.batches()


def test_a_second_producer_is_told_of_the_first(
    flags: dict[str, Any], configure: Configure, client: redis.Redis, tmp_path: Path, until: Until
) -> None:
    pipe = tmp_path / "pipe.jsonl"
    os.mkfifo(pipe)
    first = in_thread(lambda: produce(configure(pipe), progress=False))
    with pipe.open("w") as file:
        file.writelines(questions(20))
        file.flush()
        until(lambda: queued(client), what="the first producer at work")
        data = write(tmp_path / "data.jsonl", questions(5))
        argument = json.dumps({**flags, "producer.data": str(data)})

        second = subprocess.run(
            [sys.executable, "-c", PRODUCE, argument], capture_output=True, text=True, check=False, timeout=120
        )

    assert first.result(60).new == 20
    assert second.returncode == 1
    assert f"pid {os.getpid()} since" in second.stderr
    assert "one producer per run at a time" in second.stderr


def test_a_column_splits_and_the_overlap_of_the_two_sides_is_counted(configure: Configure, tmp_path: Path) -> None:
    rows = [
        {"question": "How tall is a giraffe?", "split": "train"},
        {"question": "How tall is a horse?", "split": "train"},
        {"question": "how tall is a  GIRAFFE", "split": "test"},
        {"question": "How tall is a giraffe ?!", "split": "test"},
        {"question": "How tall is a mouse?", "split": "test"},
    ]
    lines = [json.dumps(row) + "\n" for row in rows]

    report = produce(configure(write(tmp_path / "data.jsonl", lines)), progress=False)

    assert (report.train, report.heldout, report.overlap) == (2, 3, 2)
    assert produce(configure(tmp_path / "data.jsonl"), progress=False).overlap == 2


def test_texts_with_every_kind_of_line_break_survive_the_shard(
    configure: Configure, storage: FileStorage, tmp_path: Path
) -> None:
    text = "a\u2028b\u2029c\x85d\x0be\x0cf\r\ng\x1eh"

    produce(configure(write(tmp_path / "data.jsonl", [json.dumps({"prompt": text}) + "\n"])), progress=False)

    assert contents(Run.open(storage, "run")) == {text: 1}


def test_what_is_not_set_and_a_redis_that_is_away_are_said(
    configure: Configure, redis_server: Embedded, tmp_path: Path
) -> None:
    data = write(tmp_path / "data.jsonl", questions(3))

    with pytest.raises(SettingsError, match=r"producer\.data is not set"):
        produce(configure(""), progress=False)
    with pytest.raises(SettingsError, match=r"target\.model is not set"):
        produce(configure(data, target__model=""), progress=False)
    redis_server.stop()
    with pytest.raises(QueueError, match=r"does not answer: .*[^.]\. Start it"):
        produce(configure(data), progress=False)


@pytest.mark.parametrize("returns", [True, False])
def test_a_redis_that_goes_away_in_mid_run_is_waited_for_and_costs_nothing(
    configure: Configure,
    redis_server: Embedded,
    storage: FileStorage,
    tmp_path: Path,
    until: Until,
    caplog: pytest.LogCaptureFixture,
    returns: bool,
) -> None:
    pipe = tmp_path / "pipe.jsonl"
    os.mkfifo(pipe)
    lines = questions(60)
    outcome = in_thread(lambda: produce(configure(pipe, claims__ttl_s=60 if returns else 1), progress=False))
    with pipe.open("w") as file:
        file.writelines(lines[:20])
        file.flush()
        until(lambda: any(storage.list("run/prompts")), what="the first shard")
        redis_server.stop()
        file.writelines(lines[20:])
    until(lambda: "publishing failed" in caplog.text, what="a publish that failed")

    if returns:
        redis_server.start()
        assert outcome.result(120).new == 60
    else:
        with pytest.raises(QueueError, match="produce again and it goes on"):
            outcome.result(120)
        redis_server.start()
        produce(configure(write(tmp_path / "data.jsonl", lines)), progress=False)

    run = Run.open(storage, "run")
    assert contents(run) == texts(lines)
    with connect(configure(pipe)) as client:
        assert set(queued(client)) == set(run.batches())


def test_two_producers_that_start_on_a_new_run_at_once_leave_one_run_with_nothing_doubled(
    flags: dict[str, Any], configure: Configure, storage: FileStorage, tmp_path: Path
) -> None:
    lines = questions(300)
    argument = json.dumps({**flags, "producer.data": str(write(tmp_path / "data.jsonl", lines))})
    children = [
        subprocess.Popen([sys.executable, "-c", PRODUCE, argument], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for _ in range(2)
    ]
    for child in children:
        _, said = child.communicate(timeout=120)
        assert child.returncode == 0 or b"busy: " in said, said.decode()

    assert contents(Run.open(storage, "run")) == texts(lines)


def test_a_terminal_shows_how_far_it_is_and_a_log_file_does_not(flags: dict[str, Any], tmp_path: Path) -> None:
    data = write(tmp_path / "data.jsonl", questions(50))
    argument = json.dumps({**flags, "producer.data": str(data)})
    command = [sys.executable, "-c", PRODUCE.replace("progress=False", "progress=True"), argument]
    terminal, end = pty.openpty()
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "160"}

    shown = subprocess.run(command, stdout=subprocess.PIPE, stderr=end, env=env, check=True, timeout=120)
    os.close(end)
    drawn = os.read(terminal, 1 << 16).decode()
    os.close(terminal)
    logged = subprocess.run(command, capture_output=True, env=env, check=True, timeout=120)

    assert "100%" in drawn
    assert "50 lines" in drawn
    assert "50 prompts" in drawn
    assert json.loads(shown.stdout)["new"] == 50
    assert logged.stderr == b""


def test_the_command_shows_one_table_without_empty_rows_and_no_log_line(flags: dict[str, Any], tmp_path: Path) -> None:
    data = write(tmp_path / "data.jsonl", questions(50))
    knobs = [text for key, value in flags.items() for text in ("--set", f"{key}={value}")]
    command = [sys.executable, "-m", "draftfleet", "produce", str(data), *knobs]

    shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)

    first, *rows = shown.stderr.splitlines()
    assert first == "produced"
    assert [row for row in rows if not row.startswith("  ") or row.endswith("-")] == []
    assert "rejected for" not in shown.stderr
    assert json.loads(shown.stdout)["rejected_for"] == {}


@pytest.mark.parametrize(
    "secret",
    ["redis://:hunter2@host:6379/0", "queue.url=redis://me:hunter2@host", "worker.api_key=hunter2", "--token hunter2"],
)
def test_no_secret_of_the_command_line_reaches_run_json(secret: str) -> None:
    shown = without_secrets(["draftfleet", "produce", *secret.split(" "), "--run", "mine"])

    assert "hunter2" not in shown
    assert shown.endswith("--run mine")
