"""What a run has come to, in words: what is there already, and the summary at the end."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from following import Pace

from draftfleet import status
from draftfleet.accounting import Accountant, Accounting
from draftfleet.runs import Run
from draftfleet.settings import Settings


@dataclass(frozen=True, slots=True)
class Drafter:
    """What a run holds of a drafter."""

    folder: Path
    progress: dict[str, Any]

    @classmethod
    def of(cls, run: Run, name: str) -> Drafter:
        return cls(run.drafter_dir(name), status.drafters(run).get(name, {}))

    @property
    def step(self) -> int:
        return int(self.progress.get("step", 0))

    @property
    def is_trained(self) -> bool:
        return bool(self.progress.get("finished"))

    @property
    def evaluation(self) -> dict[str, Any] | None:
        """The one of the last checkpoint, if it was made."""
        found = _read(self.folder / "evaluation.json")
        return found if found.get("checkpoint") == f"step-{self.step:06d}" else None

    @property
    def exports(self) -> dict[str, Path] | None:
        """The folders that were made from the last checkpoint, if both are there."""
        folders = {name: self.folder / "export" / name for name in ("vllm", "sglang")}
        steps = {_read(folder / "export.json").get("step") for folder in folders.values()}
        return folders if steps == {self.step} else None


def found(run: Run, drafter: Drafter) -> list[str]:
    """What an earlier start of the demo has done."""
    account = Accountant(run).account()
    answered = account.ok + account.truncated + account.failed
    lines = [f"{answered:,} of {account.rows:,} prompts answered"]
    if drafter.step:
        lines.append(f"step {drafter.step:,} of {drafter.progress['max_steps']:,} trained")
    if drafter.is_trained and drafter.evaluation:
        lines.append("drafter evaluated")
    if drafter.is_trained and drafter.exports:
        lines.append("drafter exported")
    return lines


def is_finished(run: Run, drafter: Drafter) -> bool:
    """Whether nothing is left for the demo to do."""
    made = drafter.is_trained and drafter.evaluation and drafter.exports
    return bool(made) and Accountant(run).account().is_complete


def summary(settings: Settings, account: Accounting, drafter: Drafter, pace: Pace) -> list[str]:
    from trainer.export import serve_command  # noqa: PLC0415  brings torch, for which a start would have to wait

    evaluation = _made(drafter)
    k = evaluation["k"]
    path = Path(settings.target.path)
    target = str(path.absolute()) if path.exists() else settings.target.path
    per_position = " / ".join(f"{share:.3f}" for share in evaluation["acceptance_per_position"])
    equal = "all" if evaluation["lossless"] else f"{evaluation['lossless_prompts']} of {evaluation['prompts']}"
    rate = f" at {pace.tokens_per_s:,.0f} tokens/s" if pace.tokens_per_s else ""
    lines = [
        f"rows        {account.ok:,} ok, {account.truncated:,} truncated, {account.failed:,} failed, "
        f"{account.pending:,} pending of {account.expected:,}",
        f"tokens      {account.tokens:,}{rate}",
        f"drafter     step {drafter.step:,}; {drafter.progress['trained_tokens']:,} tokens trained on",
        f"acceptance  {evaluation['acceptance_length']:.2f} of at most {k + 1} tokens per target pass, on "
        f"{evaluation['prompts']} held-out prompts; by position {per_position}",
        f"lossless    {equal} held-out answers are those of the target alone, token for token",
        f"files       {drafter.folder}",
    ]
    for engine, folder in (drafter.exports or {}).items():
        command = serve_command(engine, folder.absolute(), target, k)
        lines += [f"serve it with {engine}:", *broken(command)]
    return lines


def broken(command: str) -> list[str]:
    """A command with each option on a line of its own, so that it can be copied from a narrow terminal."""
    lines: list[str] = []
    for word in shlex.split(command):
        if not lines or word.startswith("--"):
            lines.append(f"{'    ' if lines else '  '}{shlex.quote(word)}")
        else:
            lines[-1] += f" {shlex.quote(word)}"
    return [f"{line} \\" for line in lines[:-1]] + lines[-1:]


def result(account: Accounting, drafter: Drafter) -> dict[str, Any]:
    """The line for programs."""
    evaluation = _made(drafter)
    rows = {name: getattr(account, name) for name in ("ok", "truncated", "failed", "pending", "tokens")}
    judged = {name: evaluation[name] for name in ("acceptance_length", "acceptance_per_position", "lossless")}
    return {"run": account.run, "prompts": account.expected, **rows, **judged, "drafter": str(drafter.folder)}


def _made(drafter: Drafter) -> dict[str, Any]:
    assert drafter.evaluation, f"step {drafter.step} of {drafter.folder} has no evaluation"
    return drafter.evaluation


def _read(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return {}
