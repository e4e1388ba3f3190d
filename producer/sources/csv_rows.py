"""CSV: a header, then one row a prompt. Commas, semicolons or tabs, as the header has them; fields may be quoted."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from typing import IO

from draftfleet.errors import DataError
from producer.shapes import Malformed, Row

LONGEST_FIELD_CHARS = 1 << 24
"""A field longer than this is taken for a quote that was never closed."""


def read_csv(stream: IO[bytes]) -> Iterator[tuple[int, Row | Malformed]]:
    """Numbered by the line on which a row begins. An empty field counts as absent."""
    csv.field_size_limit(LONGEST_FIELD_CHARS)
    text = io.TextIOWrapper(stream, encoding="utf-8-sig", errors="surrogateescape", newline="")
    first = text.readline()
    columns = _header(first)
    rows = csv.reader(text, delimiter=_delimiter(first), strict=True)
    number = 2
    try:
        for fields in rows:
            if fields:
                yield number, _row(fields, columns)
            number = rows.line_num + 2
    except csv.Error as error:
        raise DataError(
            f"the row that begins on line {number} is no CSV: {error}. What came before it is queued; mend the line "
            "and produce again: only what is new is added."
        ) from None


def _header(line: str) -> list[str]:
    return [name.strip() for name in next(csv.reader([line], delimiter=_delimiter(line)), [])]


def _delimiter(header: str) -> str:
    return max(",;\t", key=header.count)


def _row(fields: list[str], columns: list[str]) -> Row | Malformed:
    if len(fields) != len(columns):
        return Malformed(f"{len(fields)} fields where the header has {len(columns)}")
    row = {name: field for name, field in zip(columns, fields, strict=True) if field}
    for name, field in row.items():
        if not field.isascii() and (bad := next((c for c in field if "\udc80" <= c <= "\udcff"), None)):
            return Malformed(f"not UTF-8: byte 0x{ord(bad) - 0xDC00:02x} in {name}")
    return row
