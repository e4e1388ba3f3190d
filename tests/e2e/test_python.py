"""The page on Python, run as it is written, and that `Run` can do what the command line can."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest

import draftfleet
from draftfleet import Run
from draftfleet.errors import RunMissing, SettingsError
from draftfleet.roles import ROLES
from draftfleet.testing import FakeServer

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/python.md"

METHOD_OF = {
    "dead list": "dead_letters",
    "dead show": "dead_letters",
    "dead export": "dead_letters",
    "dead revive": "revive",
    "runs priority": "set_priority",
    "runs budget": "set_token_budget",
    "runs delete": "delete",
    "trainer": "serve_trainer",
    "continue": "go_on",
}
"""Of verbs whose method has another name."""

OF_NO_RUN = {
    "join": "a node's command: `work` with settings that the storage holds",
    "flower": "a web page; `up` serves it",
    "generate": "a command: `up`, `produce`, `wait` and `export_data` in one",
    "down": "ends an `up` that was detached; the block of `up` ends its own",
    "logs": "for a terminal; the stack that `up` yields names their folder",
    "capture-command": "prints a command, for a person to run beside an engine",
    "runs list": "of all runs",
    "presets": "a table of the documentation",
}
"""Verbs without a method."""


def blocks() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)


def test_the_examples_of_the_page_run_as_they_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("examples", "draftfleet", "producer", "workers", "trainer"):
        (tmp_path / name).symlink_to(ROOT / name)
    first, second, third = blocks()

    with FakeServer(model="tiny", tokenizer=str(ROOT / "examples/tiny-target")) as server:
        scope: dict[str, Any] = {}
        exec(first.replace("http://127.0.0.1:8000", server.url), scope)
        said = capsys.readouterr().out

        exec(second, scope)
        knobs = scope["run"].settings
        scope["run"] = Run(
            "sums", storage="data", model="tiny", target="examples/tiny-target", settings={"sampling.max_tokens": 256}
        )
        scope["questions"] = [f"What is {number} + 4?" for number in range(30, 34)] + [["no message"], 7]
        with scope["run"].up():
            exec(third, scope)

    assert "pending=0" in said
    assert said.count("What is") == 32
    assert "What is 31 + 4?" in said
    assert (knobs.sampling.n, knobs.sampling.max_tokens, knobs.worker.concurrency) == (4, 4096, 48)
    report = scope["report"]
    assert (report.new, report.already, report.malformed) == (2, 2, 2)


def test_every_verb_about_a_run_has_a_method() -> None:
    methods = {name for name, _ in inspect.getmembers(Run, inspect.isfunction)}
    verbs = set(ROLES) - set(OF_NO_RUN)

    lacking = {verb for verb in verbs if METHOD_OF.get(verb, verb.replace("-", "_")) not in methods}

    assert not lacking
    assert set(OF_NO_RUN) <= set(ROLES)


def test_every_public_method_is_typed_and_told_of() -> None:
    page = PAGE.read_text()

    for name, method in inspect.getmembers(Run, inspect.isfunction):
        if name.startswith("_"):
            continue
        hints = inspect.signature(method)
        assert method.__doc__ or name.startswith("set_"), name
        assert hints.return_annotation is not inspect.Signature.empty, name
        assert f"`{name}(" in page or f"{name}(" in page, name


def test_a_run_that_is_not_there_and_a_knob_that_is_none_are_told(tmp_path: Path) -> None:
    run = Run("absent", storage=tmp_path, model="tiny")

    with pytest.raises(RunMissing, match="run absent is not in"):
        run.accounting()
    with pytest.raises(SettingsError, match=r"worker\.concurency"):
        Run("absent", settings={"worker.concurency": 4})


def test_importing_the_package_brings_nothing_along() -> None:
    assert set(vars(draftfleet)) & {"Run", "pyarrow"} <= {"Run"}
    assert repr(Run("first", storage="data")).startswith("Run('first'")
