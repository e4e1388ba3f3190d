"""The tutorial, command by command as it is written: only the port is another, and who watches is a loop."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from draftfleet.accounting import Accountant, Accounting
from draftfleet.ports import free_port
from draftfleet.runs import Run
from draftfleet.storage import FileStorage

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/tutorial.md").read_text()
SECTIONS = dict(enumerate(re.split(r"^## \d\. ", PAGE, flags=re.MULTILINE)))
"""By their numbers; 0 is what to do before."""
WATCH = "draftfleet status --watch"

Until = Callable[..., Any]


class Reader:
    """Somebody with a shell in the tutorial's folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = str(free_port())
        self.at_work: list[subprocess.Popen[bytes]] = []
        (folder / "bin").mkdir()
        for name, arguments in (("draftfleet", "-m draftfleet"), ("python", "")):
            program = folder / "bin" / name
            program.write_text(f'#!/bin/sh\nexec {sys.executable} {arguments} "$@"\n')
            program.chmod(0o755)
        self.environment = os.environ | {
            "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "DRAFTFLEET_STORAGE__MIN_FREE_GB": "0",
        }

    def follow(self, section: int, until: Until, finished: Callable[[Path], bool] | None = None) -> str:
        """Run the blocks of a section. Returns all that was said; fails where a command does."""
        said = ""
        for block in re.findall(r"^```bash\n(.*?)^```$", SECTIONS[section], re.DOTALL | re.MULTILINE):
            text = block.replace(":9000", f":{self.port}").replace("--port 9000", f"--port {self.port}")
            if "stays until Ctrl-C" in text:
                self.stay(text)
                continue
            for part in re.split(rf"(^{WATCH}$)", text, flags=re.MULTILINE):
                if part == WATCH:
                    assert finished is not None
                    until(lambda: finished(self.folder), what=f"the end of section {section}", deadline_s=200)
                elif part.strip():
                    said += self.run(part)
        return said

    def run(self, text: str) -> str:
        result = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", text],
            cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=200, check=False,
        )  # fmt: skip
        assert result.returncode == 0, f"{text}\n{result.stdout}\n{result.stderr}"
        return result.stdout + result.stderr

    def stay(self, text: str) -> None:
        command = "exec " + text.partition("\n")[2]
        with (self.folder / f"log-{len(self.at_work)}").open("wb") as log:
            self.at_work.append(
                subprocess.Popen(["bash", "-c", command], cwd=self.folder, env=self.environment, stdout=log, stderr=log)
            )

    def log(self, number: int) -> str:
        return (self.folder / f"log-{number}").read_text()

    def leave(self) -> list[int]:
        codes = []
        for process in reversed(self.at_work):
            process.send_signal(signal.SIGINT)
            codes.append(process.wait(60))
        return codes


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    folder = tmp_path_factory.mktemp("home")
    (folder / "examples").symlink_to(ROOT / "examples")
    (folder / "tutorial").mkdir()
    somebody = Reader(folder / "tutorial")
    yield somebody
    for process in somebody.at_work:
        process.kill()


def account(folder: Path) -> Accounting:
    return Accountant(Run.open(FileStorage(folder / "draftfleet-data"), "first")).account()


def is_done(folder: Path) -> bool:
    """Nothing is pending, and nothing is asked again."""
    found = account(folder)
    return found.is_complete and found.failed in (0, 5)


def is_trained(folder: Path) -> bool:
    progress = folder / "draftfleet-data/first/drafters/eagle3/progress.json"
    return progress.exists() and json.loads(progress.read_text())["finished"]


def test_a_server_starts_and_the_data_are_looked_at_before_anything_is_spent(reader: Reader, until: Until) -> None:
    reader.follow(1, until)
    until(lambda: "urls" in reader.log(0), what="a fake server")

    said = reader.follow(2, until)

    assert "200 prompts + 0 duplicates" in said
    assert "0 faults" in said


def test_the_fleet_asks_and_what_failed_is_asked_again(reader: Reader, until: Until) -> None:
    reader.follow(3, until)
    until(lambda: f"server http://127.0.0.1:{reader.port} is ready" in reader.log(1), what="a fleet")

    said = reader.follow(4, until, is_done)

    assert "5 bad_request" in said
    until(lambda: account(reader.folder).failed == 0, what="rows that were asked again")


def test_the_samples_are_looked_at_and_train_a_drafter(reader: Reader, until: Until) -> None:
    said = reader.follow(5, until)
    reader.follow(6, until, is_trained)

    assert said.count("tokens: [") == 3


def test_the_drafter_is_measured_and_exported_and_the_fleet_ends(reader: Reader, until: Until) -> None:
    said = reader.follow(7, until)

    assert "of at most 4 tokens per pass of the target" in said
    assert "all answers are those of the target alone, token for token" in said
    exported = reader.folder / "draftfleet-data/first/drafters/eagle3/export"
    assert {path.name for path in exported.iterdir()} == {"vllm", "sglang"}
    assert reader.leave() == [0, 0]


def test_every_section_with_a_command_is_followed() -> None:
    assert [number for number, text in SECTIONS.items() if "```bash" in text] == [0, 1, 2, 3, 4, 5, 6, 7]
