"""JSON Lines: one object a line, in UTF-8."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import IO, cast

from producer.shapes import Malformed, Row, kind


def read_json_lines(stream: IO[bytes]) -> Iterator[tuple[int, Row | Malformed]]:
    """A line that cannot be read is Malformed, and the rest goes on."""
    for number, line in enumerate(stream, 1):
        if line := line.rstrip():
            yield number, _parse(line, first=number == 1)


def _parse(line: bytes, *, first: bool) -> Row | Malformed:
    try:
        value: object = _DECODER.decode(line.decode("utf-8-sig" if first else "utf-8"))
    except UnicodeDecodeError as error:
        return Malformed(f"not UTF-8: byte 0x{line[error.start]:02x} at position {error.start + 1}")
    except json.JSONDecodeError as error:
        return Malformed(f"not JSON: {error.msg} at position {error.colno}")
    except (ValueError, RecursionError) as error:
        return Malformed(f"not JSON: {error}")
    return cast(Row, value) if isinstance(value, dict) else Malformed(f"{kind(value)}, not an object")


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is no JSON number")


# Python would read NaN and write it again, and no server would take it.
_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)
