"""An evaluation of a drafter as a person reads it: the figure that counts, then where it comes from."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator, Mapping
from typing import Any, cast

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from draftfleet.tables import Fitted

PARTS = {"domains": "source", "phases": "phase", "context": "at token", "turns": "turn"}
"""What an evaluation is broken down by, and the word for it."""


def show(evaluation: Any, *, as_json: bool) -> None:
    """`evaluation` is a dataclass, or the mapping that evaluation.json holds. The table goes to standard error, and one
    JSON line to standard output where a program may read it."""
    is_record = dataclasses.is_dataclass(type(evaluation))
    said = cast(dict[str, Any], dataclasses.asdict(evaluation) if is_record else dict(evaluation))
    if not as_json:
        console = Console(stderr=True, highlight=False)
        for part in drawn(said):
            console.print(part)
    if as_json or not sys.stdout.isatty():
        print(json.dumps(said, default=str, ensure_ascii=False), flush=True)


def drawn(said: Mapping[str, Any]) -> Iterator[RenderableType]:
    """What is not there is left out."""
    if "acceptance_length" not in said:
        return
    yield _head(said)
    yield Fitted(_parts(said))
    if len(said.get("sweep") or ()) > 1:
        yield ""
        yield Fitted(_sweep(said["sweep"]))
    for warning in said.get("warnings") or ():
        yield Text.assemble(("\nwarning  ", "bold red"), (str(warning), "red"))


def _head(said: Mapping[str, Any]) -> Text:
    k = said["k"]
    what = f"{said['drafter']} of run {said['run']}, {said['checkpoint']}"
    how = "greedy" if not said.get("temperature") else f"sampled at temperature {said['temperature']:g}"
    text = Text.assemble(
        ("evaluated  ", "bold"),
        f"{what}; k = {k}, {how}, {said['prompts']:,} prompts\n\n",
        (f"  {said['acceptance_length']:.2f}", "bold green" if not said.get("warnings") else "bold yellow"),
        f" of at most {k + 1} tokens per pass of the target",
        (f"   95 %: {_interval(said)}" if said.get("interval") else "", "dim"),
    )
    if said.get("expected_acceptance_length") is not None:
        text.append(f"\n  {said['expected_acceptance_length']:.2f} by sum min(p, q)")
    text.append(f"\n  {said['speedup']:.2f} times as fast as without, one request at a time, in this process\n")
    if said.get("lossless") is not None:
        text.append(
            "  all answers" if said["lossless"] else f"  {said['lossless_prompts']:,} of {said['prompts']:,} answers"
        )
        text.append(" are those of the target alone, token for token\n")
    forced = said.get("teacher_forced")
    if forced:
        sign = "a gap" if forced["is_alarming"] else "no gap"
        text.append(f"  {forced['acceptance_length']:.2f} teacher-forced, of the same drafts: {sign}\n")
    return text


def _parts(said: Mapping[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("")
    for name in ("length", "95 %", "drafts", "from", "kept up to position, %"):
        table.add_column(name, justify="left" if name.startswith("kept") else "right")
    rows = [("all", {**said, "conversations": said.get("conversations", said["prompts"])})]
    rows += [
        (f"{word} {name}", one)
        for part, word in PARTS.items()
        for name, one in (said.get(part) or {}).items()
        if len(said[part]) > 1 or part == "domains"
    ]
    for name, one in rows:
        kept = " ".join(f"{100 * share:.0f}" for share in one["acceptance_per_position"])
        table.add_row(
            Text(name),
            f"{one['acceptance_length']:.2f}",
            _interval(one),
            f"{one['drafts']:,}",
            f"{one['conversations']:,}",
            kept,
        )
    return table


def _sweep(rows: list[dict[str, Any]]) -> Table:
    """The fastest is marked."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("k", "length", "95 %", "tokens/s", "times plain"):
        table.add_column(name, justify="right")
    fastest = max(row["speedup"] for row in rows)
    for row in rows:
        table.add_row(
            str(row["k"]),
            f"{row['acceptance_length']:.2f}",
            _interval(row),
            f"{row['tokens_per_s']:,.0f}",
            f"{row['speedup']:.2f}",
            style="bold" if row["speedup"] == fastest else "",
        )
    return table


def _interval(one: Mapping[str, Any]) -> str:
    found = one.get("interval")
    return f"{found[0]:.2f} - {found[1]:.2f}" if found else "?"
