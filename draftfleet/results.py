"""What a verb ended with: lines for a person on standard error, one JSON line for a program on standard output."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping
from typing import Any, cast


def show(run: str, done: str, result: Any) -> None:
    """`result` is a dataclass or a mapping."""
    fields = {"run": run, **cast(Mapping[str, Any], _plain(result))}
    width = max(map(len, fields))
    lines = [done, *(f"  {name.replace('_', ' '):{width}}  {_text(value)}" for name, value in fields.items())]
    print("\n".join(lines), file=sys.stderr)
    print(json.dumps(fields, default=str, ensure_ascii=False), flush=True)


def _plain(result: Any) -> Any:
    return dataclasses.asdict(result) if dataclasses.is_dataclass(type(result)) else result


def _text(value: Any) -> str:
    if value is None or value in ([], {}):
        return "-"
    match value:
        case bool():
            text = "yes" if value else "no"
        case int():
            text = f"{value:,}"
        case float():
            text = f"{value:.3f}"
        case list() | tuple():
            text = " / ".join(map(_text, value))
        case dict():
            text = ", ".join(f"{key} {_text(one)}" for key, one in value.items())
        case _:
            text = str(value)
    return text
