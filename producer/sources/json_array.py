"""A .json file: an array of objects, read object by object, or JSON Lines under another name."""

from __future__ import annotations

import codecs
import io
import json
from collections.abc import Iterator
from typing import IO, Any, cast

from draftfleet.errors import DataError
from producer.shapes import Malformed, Row, kind
from producer.sources.json_lines import read_json_lines

CHUNK_BYTES = 1 << 20
LONGEST_CHARS = 1 << 27
"""An object longer than this is taken for a fault in the file: what follows would be read whole to find its end."""


def read_json(stream: IO[bytes]) -> Iterator[tuple[int, Row | Malformed]]:
    """Numbered by object in an array, by line otherwise. Raises DataError where an array is broken."""
    start = _Start(stream)
    if start.first == b"[":
        return _read_array(start)
    return read_json_lines(cast(IO[bytes], start))


class _Start:
    """A stream whose first byte that is no white space is known."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._seen = b""
        while not self._seen.removeprefix(codecs.BOM_UTF8).strip():
            more = stream.readline(CHUNK_BYTES)
            if not more:
                break
            self._seen += more
        self.first = self._seen.removeprefix(codecs.BOM_UTF8).strip()[:1]

    def __iter__(self) -> Iterator[bytes]:
        seen = self._seen if self._seen.endswith(b"\n") else self._seen + self._stream.readline()
        yield from io.BytesIO(seen)
        yield from self._stream

    def read(self, size: int) -> bytes:
        seen, self._seen = self._seen, b""
        return seen or self._stream.read(size)


class _Text:
    """What was read of the array and is not yet taken, with the constants that are no JSON noted as they are met."""

    def __init__(self, start: _Start) -> None:
        self.text, self.place, self.has_ended = "", 0, False
        self._start = start
        self._decode = codecs.getincrementaldecoder("utf-8-sig")("surrogateescape").decode
        self._constants: list[str] = []
        self._decoder = json.JSONDecoder(parse_constant=self._constants.append)

    def more(self) -> None:
        """Twice as much as waits, so that a long object is not tried at every chunk."""
        wanted = max(CHUNK_BYTES, len(self.text) - self.place)
        chunk = self._start.read(wanted)
        self.has_ended = not chunk
        self.text, self.place = self.text[self.place :] + self._decode(chunk, final=self.has_ended), 0

    def next_mark(self) -> str:
        """The next character that is no white space, not taken; empty at the end."""
        while True:
            while self.place < len(self.text) and self.text[self.place].isspace():
                self.place += 1
            if self.place < len(self.text) or self.has_ended:
                return self.text[self.place : self.place + 1]
            self.more()

    def next_value(self, number: int) -> object:
        while True:
            self._constants.clear()
            try:
                value, self.place = self._decoder.raw_decode(self.text, self.place)
            except json.JSONDecodeError as error:
                if self.has_ended or self._is_wrong(error) or len(self.text) - self.place > LONGEST_CHARS:
                    raise DataError(_broken(number, error.msg)) from None
                self.more()
            except RecursionError:
                raise DataError(_broken(number, "nested too deeply")) from None
            else:
                if self._constants:
                    return Malformed(f"not JSON: {self._constants[0]} is no JSON number")
                return value

    def _is_wrong(self, error: json.JSONDecodeError) -> bool:
        """Whether more text cannot mend it: it stands before what a cut in a literal or an escape could spoil."""
        return not error.msg.startswith("Unterminated string") and error.pos < len(self.text) - 16


def _read_array(start: _Start) -> Iterator[tuple[int, Row | Malformed]]:
    text = _Text(start)
    text.next_mark()
    text.place += 1
    number, mark = 0, text.next_mark()
    while mark != "]":
        number += 1
        yield number, _row(text.next_value(number))
        mark = text.next_mark()
        if mark not in (",", "]"):
            raise DataError(_broken(number, "no comma and no ] after it" if mark else "the file ends after it"))
        if mark == ",":
            text.place += 1
            text.next_mark()


def _row(value: Any) -> Row | Malformed:
    if isinstance(value, Malformed):
        return value
    return cast(Row, value) if isinstance(value, dict) else Malformed(f"{kind(value)}, not an object")


def _broken(number: int, why: str) -> str:
    return (
        f"the JSON array is broken at object {number}: {why}. What came before it is queued; put a whole file in its "
        "place and produce again: only what is new is added."
    )
