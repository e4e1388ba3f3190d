"""The settings of a command as a file: with it, every other verb finds what that command made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

from draftfleet import secrets
from draftfleet.redaction import redact
from draftfleet.settings import Settings, describe

FIRST = "# Written by `draftfleet generate`: give it to any other verb, as in `draftfleet status --config {}`.\n"
NAME = "draftfleet.toml"
NOT_KEPT = ("logs.file", "producer.data")


def write(settings: Settings, file: Path) -> None:
    """Every knob that is not at its default, but no secret. A file that a person has put there stays as it is."""
    if file.exists() and not file.read_text(errors="replace").startswith(FIRST[:40]):
        return
    defaults = Settings.model_construct()
    lines = [
        f"{path} = {as_toml(value)}"
        for path, field in describe()
        if "[]" not in path
        and path not in NOT_KEPT
        and not secrets.is_secret(field)
        and (value := _at(settings, path)) != _at(defaults, path)
        and value is not None
    ]
    file.write_text(redact("\n".join([FIRST.format(file), *lines]) + "\n"), encoding="utf-8")


def _at(settings: Settings, path: str) -> Any:
    section, _, key = path.rpartition(".")
    return (getattr(settings, section) if section else settings).model_dump(mode="json", include={key})[key]


def as_toml(value: Any) -> str:
    if isinstance(value, dict):
        pairs = cast(dict[str, Any], value).items()
        return "{ " + ", ".join(f"{json.dumps(key)} = {as_toml(one)}" for key, one in pairs if one is not None) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(as_toml, cast(list[Any], value))) + "]"
    return json.dumps(value)
