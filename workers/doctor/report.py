"""What a person reads, worst first, one line each; and what a program reads."""

from __future__ import annotations

import json
import socket
import sys
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

import draftfleet
from draftfleet.redaction import redact
from workers.doctor.case import Asked, Case
from workers.doctor.findings import WORST_FIRST, Finding

STYLES = {"fault": "bold red", "warning": "yellow", "skipped": "dim", "ok": "green"}
SHOWN_CHARS = 160
"""Of each text of an answer, at its start and at its end."""


def as_json(case: Case, findings: Sequence[Finding], *, seconds: float, exit_code: int) -> str:
    counts = Counter(one.level for one in findings)
    return json.dumps(
        {
            "exit_code": exit_code,
            "run": case.settings.run,
            "host": socket.gethostname(),
            "version": draftfleet.__version__,
            "seconds": round(seconds, 3),
            "counts": {level: counts[level] for level in WORST_FIRST},
            "findings": [one.to_json() for one in findings],
            "canary": [record(asked) for asked in case.asked],
        },
        ensure_ascii=False,
        default=str,
    )


def record(asked: Asked) -> dict[str, Any]:
    """All that is to be seen of one prompt and its answer; of long texts their ends."""
    question = str(asked.prompt.messages[-1].get("content") or "")
    said: dict[str, Any] = {
        "server": asked.server,
        "prompt_id": asked.prompt.prompt_id,
        "prompt": _ends(question),
        "max_tokens": asked.max_tokens,
        "seconds": round(asked.seconds, 3),
        "error": redact(str(asked.error)) if asked.error else None,
    }
    completion = asked.completion
    if completion is None:
        return said
    tokens = completion.completion_tokens
    return said | {
        "finish_reason": completion.finish_reason,
        "outcome": completion.outcome,
        "reasoning_source": completion.reasoning_source,
        "reasoning": _ends(completion.reasoning),
        "content": _ends(completion.content),
        "tool_calls": completion.tool_calls,
        "prompt_tokens": completion.prompt_tokens,
        "completion_tokens": tokens,
        "ids": len(asked.ids),
        "ids_source": asked.ids_source,
        "ids_match": asked.ids_source != "none" and len(asked.ids) == tokens,
        "tokens_per_s": round(tokens / asked.seconds, 1) if asked.seconds > 0 and tokens > 0 else None,
    }


def _ends(text: str | None) -> str | None:
    if text is None or len(text) <= 2 * SHOWN_CHARS:
        return text
    return f"{text[:SHOWN_CHARS]} [...] {text[-SHOWN_CHARS:]}"


def show(case: Case, findings: Sequence[Finding], *, seconds: float, records: bool) -> None:
    console = Console(highlight=False, soft_wrap=True)
    to_do = sorted(
        (one for one in findings if one.level in ("fault", "warning")), key=lambda one: WORST_FIRST.index(one.level)
    )
    for finding in to_do:
        _print(console, finding)
    if to_do:
        console.print()
    for subject in dict.fromkeys(one.subject for one in findings):
        for finding in (one for one in findings if one.subject == subject and one not in to_do):
            _print(console, finding)
    if records:
        for asked in case.asked:
            console.print()
            for name, value in record(asked).items():
                console.print(Text.assemble((f"  {name:18}", "dim"), _one_line(value)))
    console.print()
    console.print(in_short(findings, seconds))


def _print(console: Console, finding: Finding) -> None:
    """On one line for a program; on a terminal what does not fit on it goes on below its beginning."""
    level = Text(f"{finding.level:8}", STYLES[finding.level])
    subject = Text(f"{finding.subject:10}", "bold")
    said = Text.assemble((f"{finding.check}: ", "dim"), _one_line(redact(finding.found)))
    if finding.fix:
        said.append(f" -> {_one_line(redact(finding.fix))}", "cyan")
    if not console.is_terminal:
        console.print(level, subject, said)
        return
    grid = Table.grid(padding=(0, 1))
    grid.add_row(level, subject, said)
    console.print(grid, soft_wrap=False)


def _one_line(value: object) -> str:
    return " ".join(value.split()) if isinstance(value, str) else str(value)


def in_short(findings: Sequence[Finding], seconds: float) -> Text:
    counts = Counter(one.level for one in findings)
    worst = next(level for level in WORST_FIRST if counts[level] or level == "ok")
    said = [
        f"{counts[level]} {level}{'s' if level in ('fault', 'warning') and counts[level] != 1 else ''}"
        for level in WORST_FIRST
    ]
    return Text(f"{', '.join(said)}, in {seconds:.1f} s", style=STYLES[worst])


@contextmanager
def progress(*, enabled: bool) -> Generator[Callable[[list[str]], object]]:
    """On standard error: which subjects are still being looked at."""
    if not enabled:
        yield lambda subjects: None
        return
    with Console(file=sys.stderr).status("looking") as status:
        yield lambda subjects: status.update(f"looking at {', '.join(subjects)}")
