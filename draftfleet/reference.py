"""Every knob written out: as a settings file, as JSON, as the reference page. Secrets are never shown."""

from __future__ import annotations

import json
import types
from collections.abc import Iterator
from itertools import groupby
from typing import Any, Literal, Union, cast, get_args, get_origin

from pydantic import SecretStr
from pydantic.fields import FieldInfo

from draftfleet.redaction import redact
from draftfleet.settings import ENV_PREFIX, Section, Settings, describe
from draftfleet.settings.section import table_of

SECRET = "(secret)"
LIST = "[]"
"""Stands in the path of a key of each entry of a list of tables."""
_KINDS = {int: "whole number", float: "number", str: "text", bool: "true or false", SecretStr: "text, secret"}
_BOUNDS = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}


def as_toml(settings: Settings) -> str:
    """The values that hold now, as a settings file with a comment on each. Unset and secret knobs are commented out."""
    lines: list[str] = []
    for section, knobs in _sections():
        if section.endswith(LIST):
            lines += [*_tables(settings, section.removesuffix(LIST), list(knobs)), ""]
            continue
        lines += [f"[{section}]"] if section else []
        for path, field in knobs:
            key, value = path.rpartition(".")[2], _value(settings, path)
            if table_of(field) is None:
                lines.append(f"# {field.description} Default: {_toml(_default(field))}.")
                lines.append(_line(key, value))
        lines.append("")
    return "\n".join(lines).rstrip()


def _tables(settings: Settings, path: str, knobs: list[tuple[str, FieldInfo]]) -> list[str]:
    """A list of tables: each with what is set in it, and its keys beside one that is commented out."""
    listed: list[Section] = _attribute(settings, path)
    lines = [f"# [[{path}]]" if not listed else f"# Keys of [[{path}]]:"]
    for inner, field in knobs:
        lines.append(f"#   {inner.rpartition('.')[2]}: {field.description} Default: {_toml(_default(field))}.")
    for one in listed:
        lines.append(f"[[{path}]]")
        lines += [_line(key, _open(getattr(one, key))) for key in type(one).model_fields if key in one.model_fields_set]
    return lines


def _line(key: str, value: Any) -> str:
    return f"# {key} = {value or ''}".rstrip() if value in (None, SECRET) else f"{key} = {_toml(value)}"


def as_json(settings: Settings) -> str:
    """One object: each knob's dotted path with its value, default and description. Tables stand in their list."""
    knobs = {
        path: {
            "value": None if LIST in path else _value(settings, path),
            "default": _default(field),
            "description": field.description,
        }
        for path, field in describe()
    }
    return json.dumps(knobs, indent=2, ensure_ascii=False)


def as_markdown() -> str:
    """The page docs/settings.md."""
    parts = [_HEAD]
    for section, knobs in _sections():
        if section:
            parts.append(f"\n## {section.removesuffix(LIST)}\n\n{_model(section).__doc__}\n")
            parts += [_EXAMPLE.format(section.removesuffix(LIST))] if section.endswith(LIST) else []
        parts.append("\n| key | default | allowed | meaning |\n|---|---|---|---|\n")
        parts += [
            f"| `{path}` | {_cell(_default(field))} | {_kind(field)} | {field.description} |\n" for path, field in knobs
        ]
    return "".join(parts)


_HEAD = f"""# Settings

Made by `python -m draftfleet settings --markdown > docs/settings.md`; a test keeps it current.

A knob has one dotted path and three ways to set it. What stands further down wins:

```text
draftfleet.toml                      [worker]
                                     concurrency = 48
{ENV_PREFIX}WORKER__CONCURRENCY=48    environment: two underscores between section and knob
--set worker.concurrency=48          flag; common knobs have a flag of their own, which wins over --set
```

`draftfleet settings` prints the values that hold now, as a settings file. An unknown key is an error that names its
path and the nearest known key. A secret (`queue.password`, `worker.api_key`, `flower.password` and what else is called
so below) stands in the environment, in the settings file, or in a file of its own, which the knob with `_file` at its
end names; given with `--set` it is refused, since every user of a machine can see the flags of a process.
"""


_EXAMPLE = """
A list: in the settings file each entry begins with `[[{0}]]`. In the environment, as JSON, and with `--set`, as TOML,
the whole list is one value. The keys of an entry:
"""


def _model(section: str) -> type[Section]:
    name, _, key = section.removesuffix(LIST).partition(".")
    model = Settings.model_fields[name].annotation
    assert isinstance(model, type)
    assert issubclass(model, Section)
    inner = table_of(model.model_fields[key]) if key else model
    assert inner is not None
    return inner


def _sections() -> Iterator[tuple[str, Iterator[tuple[str, FieldInfo]]]]:
    return groupby(describe(), key=lambda knob: knob[0].rpartition(".")[0])


def _value(settings: Settings, path: str) -> Any:
    return _open(_attribute(settings, path))


def _attribute(settings: Settings, path: str) -> Any:
    value: Any = settings
    for name in path.split("."):
        value = getattr(value, name)
    return value


def _open(value: Any) -> Any:
    """Without secrets. A table is what is set in it."""
    if isinstance(value, Section):
        return {key: _open(getattr(value, key)) for key in type(value).model_fields if key in value.model_fields_set}
    if isinstance(value, SecretStr):
        return SECRET
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, list):
        return [_open(one) for one in cast(list[Any], value)]
    if isinstance(value, dict):
        texts = {key: _open(one) for key, one in cast(dict[str, Any], value).items()}
        return SECRET if SECRET in texts.values() else texts
    return value


def _default(field: FieldInfo) -> Any:
    return field.get_default(call_default_factory=True)


def _kind(field: FieldInfo) -> str:
    bounds = [
        f"{sign} {getattr(bound, name)}"
        for bound in field.metadata
        for name, sign in _BOUNDS.items()
        if getattr(bound, name, None) is not None
    ]
    return ", ".join([_type_name(field.annotation), *bounds])


def _type_name(kind: Any) -> str:
    inner = [one for one in get_args(kind) if one is not type(None)]
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        return " or ".join(map(_type_name, inner))
    if origin is Literal:
        return " or ".join(f"`{one}`" for one in inner)
    if origin is list:
        is_table = isinstance(inner[0], type) and issubclass(inner[0], Section)
        return "list of tables" if is_table else f"list of {_type_name(inner[0])}"
    if origin is dict:
        return "table, secret" if SecretStr in inner else "table"
    if origin is not None:  # Annotated, where a bound stands inside an optional knob
        return _type_name(inner[0])
    return _KINDS[kind]


def _cell(default: Any) -> str:
    return "unset" if default is None else f"`{_toml(default)}`"


def _toml(value: Any) -> str:
    if value is None:
        return "unset"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {_toml(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    # Text, numbers and booleans are written alike in TOML and JSON.
    return json.dumps(value, ensure_ascii=False)
