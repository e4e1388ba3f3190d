"""Secrets: passwords and keys come from the environment, from the settings file, or each from a file of its own.

A knob `password` that is a secret has a knob `password_file` beside it: a file that holds nothing else, as Docker and
Kubernetes mount one. A flag is no place for a secret: every user of a machine can read the flags of its processes.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast, get_args

from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo

from draftfleet.errors import SettingsError

FILE = "_file"
"""`password_file` names the file that holds `password`."""

MOST_BYTES = 1_000_000
_HAS_LOGIN = re.compile(r"://[^\s]*@")


def is_secret(field: FieldInfo) -> bool:
    """Whether a knob holds a secret, or a table of them."""
    return field.annotation is SecretStr or any(SecretStr in (kind, *get_args(kind)) for kind in _kinds(field))


def read_files(tree: Mapping[str, Any], fields: Mapping[str, FieldInfo]) -> dict[str, Any]:
    """The settings as they were given, with each secret whose file is named read from it. Raises SettingsError."""
    result = dict(tree)
    for path, field in fields.items():
        section, _, name = path.rpartition(".")
        given = result.get(section)
        if not is_secret(field) or not isinstance(given, dict):
            continue
        knobs = cast(dict[str, Any], given)
        file = knobs.get(name + FILE)
        if not file:
            continue
        if knobs.get(name) is not None:
            raise SettingsError(f"{path} and {path}{FILE} are both set, and only one can hold: leave one of them out.")
        result[section] = knobs | {name: _read(f"{path}{FILE}", str(file), is_table=_is_table(field))}
    return result


def values(model: BaseModel) -> Iterator[str]:
    """Every secret that these settings hold."""
    for name in type(model).model_fields:
        yield from _values(getattr(model, name))


def refuse_flag(path: str, value: Any, fields: Mapping[str, FieldInfo]) -> None:
    """Raises SettingsError where `--set` was given a secret. An address without a login is none."""
    if (
        path not in fields
        or not is_secret(fields[path])
        or (path.endswith("url") and not _HAS_LOGIN.search(str(value)))
    ):
        return
    variable = "DRAFTFLEET_" + path.upper().replace(".", "__")
    raise SettingsError(
        f"--set {path}: every user of this machine can read the flags of a process. Set {variable} in the environment, "
        f"or name a file that holds it: --set {path}{FILE}=FILE."
    )


def _values(value: Any) -> Iterator[str]:
    if isinstance(value, SecretStr):
        yield value.get_secret_value()
    elif isinstance(value, BaseModel):
        yield from values(value)
    elif isinstance(value, dict):
        for one in cast(dict[str, Any], value).values():
            yield from _values(one)


def _read(knob: str, file: str, *, is_table: bool) -> Any:
    try:
        with Path(file).open("rb") as opened:
            text = opened.read(MOST_BYTES).decode().strip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        said = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise SettingsError(f"{knob} = {file} cannot be read: {said}. Name a readable file that holds it.") from None
    if not text:
        raise SettingsError(f"{knob} = {file} is empty: it should hold the secret and nothing else.")
    if not is_table:
        return text
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError:  # its text may quote a key
        raise SettingsError(f'{knob} = {file} is no TOML: write lines like "http://HOST:8000" = "KEY".') from None


def _kinds(field: FieldInfo) -> tuple[Any, ...]:
    return (field.annotation, *get_args(field.annotation))


def _is_table(field: FieldInfo) -> bool:
    return any("dict[" in str(kind) for kind in _kinds(field))
