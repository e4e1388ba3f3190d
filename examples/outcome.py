"""What a run has come to, in words: what is there already, and the summary at the end."""

from __future__ import annotations

import json
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


def summary(settings: Settings, account: Accounting, drafter: Drafter, pace: Pace) -> list[str]:
    from trainer.export import serve_command  # noqa: PLC0415  brings torch, for which a start would have to wait

    evaluation = _made(drafter)
    k = evaluation["k"]
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
        lines += [f"serve it with {engine}:", f"  {serve_command(engine, folder, settings.target.path, k)}"]
    return lines


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
