"""What a verb ended with: lines for a person on standard error, one JSON line for a program on standard output."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping
from typing import Any, cast

BREAK = "\n"
"""Between the entries of a list of mappings, each of which has a line of its own."""


def show(run: str | None, done: str, result: Any) -> None:
    """`result` is a dataclass or a mapping. What is empty is left out for the person, not for the program.

    `run` is None where the verb is about none.
    """
    fields = ({} if run is None else {"run": run}) | {**cast(Mapping[str, Any], _plain(result))}
    texts = {name.replace("_", " "): _text(value) for name, value in fields.items()}
    shown = {name: text for name, text in texts.items() if text not in ("", "-")}
    width = max(map(len, shown))
    margin = "\n" + " " * (width + 4)
    lines = [done, *(f"  {name:{width}}  {text.replace(BREAK, margin)}" for name, text in shown.items())]
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
            text = (BREAK if any(isinstance(one, dict) for one in value) else " / ").join(map(_text, value))
        case dict():
            text = ", ".join(f"{key} {_text(one)}" for key, one in value.items())
        case _:
            text = str(value)
    return text
