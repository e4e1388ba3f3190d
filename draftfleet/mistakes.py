"""What a person is told who sets a knob wrongly: the dotted path, the value, and the nearest known key.

`fields` are all knobs by dotted path.
"""

from __future__ import annotations

import difflib
import json
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from draftfleet.names import NAME, NAME_RULE
from draftfleet.redaction import redact
from draftfleet.secrets import is_secret


def unknown(path: str, source: str, fields: Mapping[str, FieldInfo]) -> str:
    leaf = path.rpartition(".")[2]
    near = difflib.get_close_matches(path, fields if "." in path else [*_sections(fields), *fields], n=1) or [
        known for known in fields if known.rpartition(".")[2] == leaf
    ]
    hint = f"did you mean {near[0]}?" if near else "`draftfleet settings` lists every key."
    return f"{source}: unknown key {path}; {hint}"


def unknown_variable(prefix: str, fields: Mapping[str, FieldInfo]) -> str | None:
    """On the first environment variable with our prefix that is no knob and no section."""
    for name in os.environ:
        path = _path(name, prefix)
        known = path in fields or path in _sections(fields) or path.startswith("sampling.extra_body.")
        if name.startswith(prefix) and not known:
            return unknown(path, f"environment variable {name}", fields)
    return None


def not_json(prefix: str, fields: Mapping[str, FieldInfo]) -> str:
    """On the environment variables that should hold a list, a table or a whole section, and do not."""
    names = ", ".join(
        name
        for name, value in os.environ.items()
        if name.startswith(prefix) and _needs_json(fields.get(_path(name, prefix))) and not _is_json(value)
    )
    example = f"""{prefix}WORKER__SERVERS='["http://127.0.0.1:8000"]'"""
    return f"environment: {names}: lists and tables are written as JSON, as in {example}."


def explain(error: ErrorDetails, fields: Mapping[str, FieldInfo], file: Path) -> str:
    """One finding of pydantic, without the value where it is a secret. `file` was read, if it is there."""
    path = ".".join(map(str, error["loc"]))
    if error["type"] == "extra_forbidden":
        return unknown(path, str(file) if _is_in(file, error["loc"]) else "settings", fields)
    if error["type"] == "value_error" and path in _sections(fields):  # ours, on knobs that do not fit together
        return f"settings: {path}: {error['msg'].removeprefix('Value error, ')}."
    shown = redact(repr(error["input"])) if _is_open(path, error["input"], fields) else "(secret)"
    is_name = error.get("ctx", {}).get("pattern") == NAME
    return f"settings: {path} = {shown}: {f'a name is {NAME_RULE}' if is_name else error['msg']}."


def _is_open(path: str, value: object, fields: Mapping[str, FieldInfo]) -> bool:
    """Whether a value may be shown. A whole section may hold a secret somewhere within, unless it is a number."""
    if path in _sections(fields) and path not in fields:
        return isinstance(value, int | float)
    return any(path == known or path.startswith(f"{known}.") for known in fields if not is_secret(fields[known]))


def _is_in(file: Path, key: tuple[int | str, ...]) -> bool:
    tree: Any = tomllib.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    for part in key:
        if not isinstance(tree, dict) or part not in tree:
            return False
        tree = cast(dict[int | str, Any], tree)[part]
    return True


def _sections(fields: Mapping[str, FieldInfo]) -> set[str]:
    return {path.partition(".")[0] for path in fields}


def _path(name: str, prefix: str) -> str:
    return name.removeprefix(prefix).lower().replace("__", ".")


def _needs_json(field: FieldInfo | None) -> bool:
    """A name that is no knob is a section: other names were refused before."""
    return field is None or any(kind in str(field.annotation) for kind in ("list[", "dict["))


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
