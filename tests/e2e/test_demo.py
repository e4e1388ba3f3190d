"""The demo, small, on all real parts: it is killed, interrupted, goes on, ends, and is started once more."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "demo.py"
MARK = "DEMO_TEST_MARK"
SMALL = {
    "producer.limit": 48,
    "producer.batch_size": 8,
    "sampling.max_tokens": 64,
    "trainer.max_steps": 8,
    "trainer.log_steps": 2,
    "evaluation.prompts": 2,
    "evaluation.max_tokens": 32,
    "claims.ttl_s": 8,
    "claims.renew_s": 2,
    "claims.sweep_s": 1,
}
KEYS = [
    *("run", "prompts", "ok", "truncated", "failed", "pending", "tokens"),
    *("acceptance_length", "acceptance_per_position", "lossless", "drafter"),
]


@dataclass
class Demo:
    """One start of the script. What it starts inherits a mark; Valkey writes over its own, so children count too."""

    workspace: Path
    terminal: bool = False
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    known: set[psutil.Process] = field(default_factory=set[psutil.Process])

    def start(self) -> Demo:
        knobs = [f"--set={name}={value}" for name, value in SMALL.items()]
        environment = os.environ | {MARK: self.mark, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TERM": "xterm"}
        reading, writing = pty.openpty() if self.terminal else os.pipe()
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT), f"--workspace={self.workspace}", *knobs],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=writing,
            start_new_session=True,
        )
        os.close(writing)
        self.told = bytearray()
        self._reader = threading.Thread(target=self._read, args=(reading,))
        self._reader.start()
        return self

    def _read(self, descriptor: int) -> None:
        """A terminal whose other end is closed gives an error, a pipe gives nothing."""
        try:
            while chunk := os.read(descriptor, 65536):
                self.told += chunk
        except OSError:
            pass
        os.close(descriptor)

    def end(self) -> tuple[int, str, str]:
        """Exit code, standard output, standard error."""
        output, _ = self.process.communicate(timeout=240)
        self._reader.join()
        return self.process.returncode, output.decode(), self.told.decode()

    def family(self) -> list[str]:
        """The command lines of its living processes: those below it, those that were, and those with its mark."""
        if self.process.poll() is None:
            self.known.update(psutil.Process(self.process.pid).children(recursive=True))
        self.known.update(process for process in psutil.process_iter() if self._is_marked(process))
        found: list[str] = []
        for process in self.known:
            try:
                if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(" ".join(process.cmdline()))
            except psutil.NoSuchProcess:
                continue
        return found

    def _is_marked(self, process: psutil.Process) -> bool:
        try:
            return process.environ().get(MARK) == self.mark
        except psutil.Error:  # it ended meanwhile, or is not ours
            return False

    def wait(self, condition: Callable[[], Any], what: str) -> None:
        deadline = time.monotonic() + 120
        while not condition():
            assert self.process.poll() is None, f"the demo ended before {what}:\n{self.told.decode()}"
            assert time.monotonic() < deadline, f"{what} did not happen:\n{self.told.decode()}"
            time.sleep(0.05)


@dataclass
class Story:
    workspace: Path
    left_by_kill: list[str]
    seen_at_interrupt: list[str]
    left_by_interrupt: list[str]
    interrupted: tuple[int, str, str]
    finished: tuple[int, str, str]
    left_at_end: list[str]
    again: tuple[int, str, str]
    result: dict[str, Any]


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    """Four starts in one workspace, since each takes its time."""
    workspace = tmp_path_factory.mktemp("demo")

    killed = Demo(workspace).start()
    killed.wait(lambda: _has(killed, "draftfleet work") and _has(killed, "transformers"), "the start of all parts")
    killed.process.kill()
    killed.end()
    left_by_kill = _what_stays(killed)

    stopped = Demo(workspace, terminal=True).start()
    rows = workspace / "data" / "demo"
    stopped.wait(lambda: any(rows.glob("partial/*")) or any(rows.glob("samples/*")), "the first finished row")
    seen = stopped.family()
    stopped.process.send_signal(signal.SIGINT)
    interrupted = stopped.end()
    left_by_interrupt = _what_stays(stopped)

    whole = Demo(workspace, terminal=True).start()
    finished = whole.end()
    assert finished[0] == 0, finished[2]
    left_at_end = _what_stays(whole)

    again = Demo(workspace).start().end()
    result = json.loads(finished[1].splitlines()[-1])
    return Story(workspace, left_by_kill, seen, left_by_interrupt, interrupted, finished, left_at_end, again, result)


def _has(demo: Demo, words: str) -> bool:
    return any(words in line for line in demo.family())


def _what_stays(demo: Demo) -> list[str]:
    """What is left of it. The kernel needs a moment to end the children of a process that was killed."""
    deadline = time.monotonic() + 10
    while (left := demo.family()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def test_the_last_line_is_the_result_and_it_adds_up(story: Story) -> None:
    result = story.result

    assert list(result) == KEYS
    assert result["prompts"] == SMALL["producer.limit"]
    assert result["ok"] + result["truncated"] + result["failed"] + result["pending"] == result["prompts"]
    assert result["pending"] == result["failed"] == 0
    assert result["tokens"] > 0


def test_the_drafter_is_judged_and_changes_no_token(story: Story) -> None:
    result = story.result

    assert result["lossless"] is True
    assert result["acceptance_length"] == pytest.approx(1 + sum(result["acceptance_per_position"]))
    assert 1 <= result["acceptance_length"] <= 4


def test_the_folders_for_both_engines_are_there_and_their_commands_are_told(story: Story) -> None:
    told = story.finished[2]

    for engine in ("vllm", "sglang"):
        folder = Path(story.result["drafter"]) / "export" / engine
        assert (folder / "model.safetensors").is_file()
        assert str(folder) in told
    assert f"{SCRIPT.parent / 'tiny-target'} \\" in told
    assert "Flower http://127.0.0.1:" in told


def test_ctrl_c_leaves_no_process_and_says_how_to_go_on(story: Story) -> None:
    code, output, told = story.interrupted

    assert code == 130
    assert output == ""
    before, stopping, after = told.partition("stopping: work in flight is put aside (Ctrl-C again ends it at once)")
    assert "samples" in before, "the bars were not live"
    assert stopping
    assert next(line for line in after.splitlines() if line).startswith("Stopped, nothing runs any more.")
    assert "goes on from here" in told.splitlines()[-1]
    parts = ("valkey", "transformers", "draftfleet work", "draftfleet trainer", "draftfleet flower")
    assert all(any(part in line for line in story.seen_at_interrupt) for part in parts)
    assert story.left_by_interrupt == []


def test_a_kill_leaves_no_process(story: Story) -> None:
    assert story.left_by_kill == []


def test_the_next_start_goes_on_and_says_so(story: Story) -> None:
    assert "This run was begun before and goes on" in story.finished[2]
    assert story.left_at_end == []


def test_a_finished_run_is_only_told_again(story: Story) -> None:
    code, output, told = story.again

    assert code == 0
    assert json.loads(output.splitlines()[-1]) == story.result
    assert "This run is finished" in told
    assert "48 of 48 prompts answered, step 8 of 8 trained, drafter evaluated, drafter exported" in told
    assert "transformers serve" not in told


def test_a_part_that_ends_is_named_and_takes_the_rest_with_it(tmp_path: Path) -> None:
    demo = Demo(tmp_path).start()
    demo.wait(lambda: _has(demo, "draftfleet trainer"), "the start of all parts")

    [flower] = [process for process in demo.known if "flower" in process.cmdline()]
    flower.kill()
    code, output, told = demo.end()

    assert code == 1
    assert output == ""
    assert "`draftfleet flower` ended with code -9" in told
    assert f"{tmp_path}/logs" in told
    assert _what_stays(demo) == []
