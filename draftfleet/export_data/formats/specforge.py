"""SpecForge's prompts, one JSON Lines file per split, as its `specforge/data/prompt_builder.py` (0.2.0) reads them.

    rows           {"id", "input_ids", "loss_mask"}       taken as they are: no template, no tokenizer
    conversations  {"id", "conversations", "tools"}       rendered and tokenized again by SpecForge

It looks at the first record alone to tell the two apart. Of a conversation it hands every further column to the chat
template as an argument, so there is none. Tools, and tool calls within messages, are JSON text: `datasets` reads the
file, and its columns have one type.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from draftfleet.export_data.formats import Format
from draftfleet.export_data.formats.files import sync
from draftfleet.export_data.formats.jsonl import ENCODE
from draftfleet.export_data.units import Unit, Wanted, conversation, ids_and_mask
from draftfleet.names import Split


class SpecForge:
    """One file, however large: the reader takes one path."""

    def __init__(self, folder: Path, split: Split, wanted: Wanted) -> None:
        self._wanted = wanted
        self._path = folder / f"{split}.jsonl"
        self._file = self._path.open("w", encoding="utf-8")

    def write(self, units: Sequence[Unit]) -> None:
        for unit in units:
            self._file.write(ENCODE(self._line(unit)) + "\n")

    def close(self) -> None:
        self._file.close()
        sync(self._path)

    def _line(self, unit: Unit) -> dict[str, Any]:
        if self._wanted.turns == "rows":
            ids, mask = ids_and_mask(unit.last)
            return {"id": unit.key, "input_ids": ids, "loss_mask": mask}
        messages = [_plain(message) for message in conversation(unit, self._wanted.reasoning)]
        return {"id": unit.key, "conversations": messages, "tools": json.dumps(unit.sample.tools or [])}


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose fields are text. Content in parts becomes the text of its parts."""
    content = message.get("content")
    if isinstance(content, list):
        content = "\n".join(str(part.get("text", "")) for part in content)
    plain = {name: value for name, value in message.items() if isinstance(value, str)} | {"content": content or ""}
    if message.get("tool_calls"):
        plain["tool_calls"] = json.dumps(message["tool_calls"], ensure_ascii=False)
    return plain


FORMAT = Format(open=SpecForge, files="{split}.jsonl", needs_ids=("rows",))
