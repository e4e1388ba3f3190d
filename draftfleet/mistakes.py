"""What a person is told who sets a knob wrongly: the dotted path, the value, and the nearest known key.

`fields` are all knobs by dotted path.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from types import NoneType
from typing import Any, cast, get_args

from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from draftfleet.names import NAME, NAME_RULE
from draftfleet.redaction import redact
from draftfleet.secrets import is_secret

_NUMBER = re.compile(r"\[\d+\]")


def unknown(path: str, source: str, fields: Mapping[str, FieldInfo]) -> str:
    if path.endswith("]") and (known := path.rpartition("[")[0]) in fields:
        example = f"--set '{known}=[{{...}}]'"
        return f"{source}: {path} cannot be set by itself; set the whole list, in a file or with {example}."
    general = _NUMBER.sub("[]", path)
    leaf = general.rpartition(".")[2]
    among = fields if "." in path else [*_sections(fields), *fields]
    if "[]" in general:  # a key of a table in a list: its neighbours come first
        table = general.rpartition(".")[0]
        among = [known for known in fields if known.rpartition(".")[0] == table] or among
    near = difflib.get_close_matches(general, among, n=1) or [
        known for known in fields if known.rpartition(".")[2] == leaf
    ]
    hint = f"did you mean {_numbered(near[0], path)}?" if near else "`draftfleet settings` lists every key."
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
    path = _dotted(error["loc"], fields)
    if error["type"] == "extra_forbidden":
        return unknown(path, str(file) if _is_in(file, error["loc"]) else "settings", fields)
    if error["type"] == "value_error" and path in _sections(fields):  # ours, on knobs that do not fit together
        return f"settings: {path}: {error['msg'].removeprefix('Value error, ')}."
    shown = redact(repr(error["input"])) if _is_open(path, error["input"], fields) else "(secret)"
    said = error["msg"].removeprefix("Value error, ")
    is_name = error.get("ctx", {}).get("pattern") == NAME
    return f"settings: {path} = {shown}: {f'a name is {NAME_RULE}' if is_name else said}."


def _is_open(path: str, value: object, fields: Mapping[str, FieldInfo]) -> bool:
    """Whether a value may be shown. A whole section may hold a secret somewhere within, unless it is a number."""
    path = _NUMBER.sub("[]", path)
    if path in _sections(fields) and path not in fields:
        return isinstance(value, int | float)
    return any(
        path == known or path.startswith((f"{known}.", f"{known}[")) for known in fields if not is_secret(fields[known])
    )


def _is_in(file: Path, key: tuple[int | str, ...]) -> bool:
    tree: Any = tomllib.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    for part in key:
        if isinstance(tree, list) and isinstance(part, int) and part < len(cast(list[Any], tree)):
            tree = cast(list[Any], tree)[part]
        elif isinstance(tree, dict) and part in tree:
            tree = cast(dict[int | str, Any], tree)[part]
        else:
            return False
    return True


def _dotted(loc: tuple[int | str, ...], fields: Mapping[str, FieldInfo]) -> str:
    """`producer.sources[1].weight`. Beyond a knob of several kinds there is only the name of one of them."""
    path = ""
    for part in loc:
        known = fields.get(_NUMBER.sub("[]", path))
        if isinstance(part, int):
            path += f"[{part}]"
        elif known is not None and len(set(get_args(known.annotation)) - {NoneType}) > 1:
            break
        else:
            path += f".{part}" if path else part
    return path


def _numbered(general: str, path: str) -> str:
    """The same number in a list as in `path`."""
    number = _NUMBER.search(path)
    return general.replace("[]", number.group(), 1) if number else general


def _sections(fields: Mapping[str, FieldInfo]) -> set[str]:
    return {path.partition(".")[0] for path in fields}


def _path(name: str, prefix: str) -> str:
    return name.removeprefix(prefix).lower().replace("__", ".")


def _needs_json(field: FieldInfo | None) -> bool:
    """A name that is no knob is a section: other names were refused before. A list that may be a text may be one."""
    kinds = str(field.annotation) if field is not None else "dict["
    return not kinds.startswith("str |") and any(kind in kinds for kind in ("list[", "dict["))


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
