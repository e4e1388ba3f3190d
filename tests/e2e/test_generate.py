"""`draftfleet generate`: prompts and servers in, answers and an exit code out, across stops and crashes."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from draftfleet.generate.checks import Wanted, WrongInput
from draftfleet.generate.run import generate
from draftfleet.runs import Run
from draftfleet.settings import load
from draftfleet.storage import FileStorage
from draftfleet.testing import FakeServer

Until = Callable[..., Any]
Flags = dict[str, Any]
PAGE = Path(__file__).parents[2] / "docs/generate.md"
DEADLINE_S = 90
FAST = ["--set", "storage.min_free_gb=0", "--set", "worker.probe_interval_s=0.2", "--set", "worker.drain_s=20"]


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "draftfleet", *map(str, arguments)]


def call(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments), capture_output=True, text=True, timeout=DEADLINE_S, check=False)


def write_prompts(file: Path, count: int, start: int = 0) -> Path:
    file.write_text("".join(json.dumps({"prompt": f"Question {start + n}?"}) + "\n" for n in range(count)))
    return file


def result_of(output: str) -> dict[str, Any]:
    [line] = output.splitlines()
    return json.loads(line)


def asked_more_than_once(server: FakeServer) -> int:
    return sum(row["requests"] > 1 for row in server.stats()["rows"].values())


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    return write_prompts(tmp_path / "prompts.jsonl", 24)


def example() -> list[str]:
    """The first command of the page, without its program."""
    [first, *_] = re.findall(r"^```bash\ndraftfleet (.*?)\n```$", PAGE.read_text(), re.MULTILINE)
    return shlex.split(first)


def test_a_file_of_prompts_becomes_answers_and_failed_rows_can_be_asked_again(tmp_path: Path, prompts: Path) -> None:
    """With the command that the page shows."""
    with prompts.open("a") as file:
        file.write("no JSON\n" + json.dumps({"prompt": "A poisoned question"}) + "\n")
    with FakeServer(model="tiny") as server:
        server.fault("status", contains="poisoned", status=400)
        line = [word.replace("http://localhost:8000", server.url) for word in example()] + FAST
        first = call(*line, "--concurrency", "4")
        [see, _] = re.findall(r"draftfleet dead list .*?(?=;)|--retry-failed", first.stderr)
        letters = call(*shlex.split(see)[1:], "--json")
        server.clear()
        again = call(*line, "--retry-failed")
        requests = server.stats(rows=False)["requests"]
        rest = call(*line)
        unasked = server.stats(rows=False)["requests"] - requests

    told = result_of(first.stdout)
    assert first.returncode == told["exit_code"] == 1, first.stderr
    assert (told["rows"], told["ok"] + told["truncated"], told["failed"], told["pending"]) == (25, 24, 1, 0)
    assert told["failed_for"] == {"bad_request": 1}
    assert told["malformed_lines"] == 1
    assert "line=25" in first.stderr
    assert "1 failed, bad_request" in first.stderr
    assert "--retry-failed" in first.stderr
    assert json.loads(letters.stdout)["status"] == 400

    assert again.returncode == 0, again.stderr
    assert result_of(again.stdout)["failed"] == 0
    answers = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert len(answers) == len({one["key"] for one in answers}) == 25
    assert all(one["answer"] and one["reasoning"] and one["messages"][0]["role"] == "user" for one in answers)
    shards = (tmp_path / "answers/default/samples").glob("*.parquet")
    assert sum(pq.read_metadata(shard).num_rows for shard in shards) == 26  # one row has two records

    assert (rest.returncode, unasked) == (0, 0)
    assert "nothing is asked" in rest.stderr


def test_stopped_and_killed_it_goes_on_and_asks_nothing_twice(tmp_path: Path, until: Until) -> None:
    prompts = write_prompts(tmp_path / "prompts.jsonl", 60)
    with FakeServer(model="tiny", spread=0, tokens=40, seconds_per_token=0.01) as server:
        line = command("generate", "--prompts", prompts, "--servers", server.url, "--out", "out", "--concurrency", "4")
        line += [*FAST, "--set", "producer.batch_size=60"]

        def answered() -> int:
            return sum(row["answered"] for row in server.stats()["rows"].values())

        stopped = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        until(lambda: answered() > 8, what="some answers")
        server.change(frozen=True)
        second = call(*line[3:])
        stopped.send_signal(signal.SIGINT)
        server.change(frozen=False)
        output, told = stopped.communicate(timeout=DEADLINE_S)
        in_flight_after_stop = server.stats(rows=False)["in_flight"]
        before = answered()

        killed = subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        until(lambda: answered() > before + 8, what="more answers")
        killed.kill()
        killed.wait()
        until(lambda: not server.stats(rows=False)["in_flight"], what="the end of the worker")
        lost = answered()
        finished = call(*line[3:])

        twice = asked_more_than_once(server)

    assert second.returncode == 2
    assert f"`draftfleet generate`, pid {stopped.pid} on " in second.stderr
    assert "since 20" in second.stderr
    assert stopped.returncode == 130
    assert "requests in flight" in told
    assert "the same command goes on from here" in told
    assert result_of(output)["set_aside"] > 8
    assert in_flight_after_stop == 0
    assert finished.returncode == 0, finished.stderr
    assert result_of(finished.stdout)["ok"] == 60
    # What was in flight at the kill, and what had not been put aside yet (a second of it); a canary asks one row again.
    assert lost < 60
    assert twice <= 4 + 16 + 3
    account = Run.open(FileStorage(tmp_path / "out"), "default")
    assert len(list(account.done())) in (1, 2)


def test_other_prompts_or_other_sampling_in_the_same_folder_are_refused_with_what_differs(
    tmp_path: Path, prompts: Path
) -> None:
    others = write_prompts(tmp_path / "others.jsonl", 3, start=100)
    with FakeServer(model="tiny") as server:
        common = ["--servers", server.url, "--out", "out", *FAST]
        assert call("generate", "--prompts", prompts, "--max-tokens", "200", *common).returncode == 0
        requests = server.stats(rows=False)["requests"]

        sampling = call("generate", "--prompts", prompts, "--max-tokens", "100", *common)
        other = call("generate", "--prompts", others, "--max-tokens", "200", *common)
        unasked = server.stats(rows=False)["requests"] - requests
        added = call("generate", "--prompts", others, "--max-tokens", "200", "--add-prompts", *common)

    assert (sampling.returncode, other.returncode, unasked) == (2, 2, 0)
    assert "sampling.max_tokens: the run has 200, now 100" in sampling.stderr
    assert str(prompts) in other.stderr
    assert str(others) in other.stderr
    assert "--add-prompts" in other.stderr
    assert added.returncode == 0, added.stderr
    assert result_of(added.stdout)["rows"] == 27


def test_what_is_wrong_is_said_before_anything_is_asked(tmp_path: Path, prompts: Path) -> None:
    """In this process: a refusal starts no other."""
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "there.jsonl").write_text("somebody's\n")
    with FakeServer(model="tiny") as server, FakeServer(model="other") as stranger, FakeServer(shape="openai") as plain:

        def refusal(
            *, data: str = str(prompts), servers: str = server.url, knobs: Flags | None = None, **wanted: Any
        ) -> str:
            flags = {"storage.url": "out", "queue.embedded_dir": "out/.draftfleet", "storage.min_free_gb": 0}
            flags |= {"producer.data": data, "worker.servers": servers.split(",")}
            with pytest.raises(WrongInput) as refused:
                generate(load(flags=flags | (knobs or {})), Wanted(**wanted))
            assert refused.value.exit_code == 2
            return str(refused.value)

        assert "--prompts missing.jsonl is not there" in refusal(data="missing.jsonl")
        assert "empty.jsonl is empty" in refusal(data="empty.jsonl")
        assert "nothing listens at http://127.0.0.1:1" in (away := refusal(servers="http://127.0.0.1:1"))
        assert "--wait-servers 30m" in away
        assert "None came within 0.1 s" in refusal(servers="http://127.0.0.1:1-3", wait_s=0.1)
        assert f"{server.url} serves 'tiny'" in refusal(knobs={"target.model": "unknown"})
        assert "do not serve one model" in refusal(servers=f"{server.url},{stranger.url}")
        assert "tells no token ids, and --target is not set" in refusal(servers=plain.url)
        assert "leaves no room for a prompt" in _with_context(server, 64, refusal)
        assert "is the file of the prompts" in refusal(jsonl=prompts)
        assert "there.jsonl is there already" in refusal(jsonl=tmp_path / "there.jsonl")
        assert "cannot be written" in refusal(jsonl=tmp_path / "no-folder/answers.jsonl")
        assert "--out /proc/out cannot be made" in refusal(knobs={"storage.url": "/proc/out"})
        assert "GB left" in refusal(knobs={"storage.min_free_gb": 1e6})
        assert [one.stats(rows=False)["requests"] for one in (server, stranger, plain)] == [0, 0, 0]
    assert not (tmp_path / "out/default").exists()


def _with_context(server: FakeServer, tokens: int, refusal: Callable[[], str]) -> str:
    server.change(max_model_len=tokens)
    return refusal()
