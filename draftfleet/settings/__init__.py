"""Every knob, with its unit and its default. A TOML file < environment < flags.

    draftfleet.toml                      [worker]
                                         concurrency = 48
    DRAFTFLEET_WORKER__CONCURRENCY=48    environment, two underscores between section and knob
    --set worker.concurrency=48          flag; the common knobs have flags of their own

A key that is not here is an error that names its dotted path and the nearest known key.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, cast

import pydantic_settings
from pydantic import Field, SecretStr, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from draftfleet import mistakes, redaction, secrets
from draftfleet.errors import SettingsError
from draftfleet.names import NAME
from draftfleet.settings.asking import Sampling, Variant
from draftfleet.settings.caching import Cache
from draftfleet.settings.capturing import Capture
from draftfleet.settings.producing import Producer, Rows, Source
from draftfleet.settings.section import Section, table_of
from draftfleet.settings.sections import (
    Claims,
    Flower,
    Logs,
    Queue,
    Storage,
    Target,
    Worker,
)
from draftfleet.settings.training import DFlash, Eagle3, Evaluation, Export, Trainer

__all__ = [
    "Cache",
    "Capture",
    "Claims",
    "DFlash",
    "Eagle3",
    "Evaluation",
    "Export",
    "Flower",
    "Logs",
    "Producer",
    "Queue",
    "Rows",
    "Sampling",
    "Section",
    "Settings",
    "Source",
    "Storage",
    "Target",
    "Trainer",
    "Variant",
    "Worker",
    "assignment",
    "describe",
    "environment",
    "load",
]

ENV_PREFIX = "DRAFTFLEET_"
DEFAULT_FILE = Path("draftfleet.toml")


class Settings(BaseSettings):
    """All of them. Made by `load`, never by itself: it would miss the file."""

    model_config = SettingsConfigDict(
        extra="forbid", frozen=True, env_prefix=ENV_PREFIX, env_nested_delimiter="__", validate_default=True
    )

    run: str = Field(default="default", pattern=NAME, description="Name of the run: its folder in the storage.")
    storage: Storage = Field(default_factory=Storage)
    queue: Queue = Field(default_factory=Queue)
    target: Target = Field(default_factory=Target)
    producer: Producer = Field(default_factory=Producer)
    sampling: Sampling = Field(default_factory=Sampling)
    worker: Worker = Field(default_factory=Worker)
    claims: Claims = Field(default_factory=Claims)
    trainer: Trainer = Field(default_factory=Trainer)
    eagle3: Eagle3 = Field(default_factory=Eagle3)
    dflash: DFlash = Field(default_factory=DFlash)
    cache: Cache = Field(default_factory=Cache)
    capture: Capture = Field(default_factory=Capture)
    evaluation: Evaluation = Field(default_factory=Evaluation)
    export: Export = Field(default_factory=Export)
    flower: Flower = Field(default_factory=Flower)
    logs: Logs = Field(default_factory=Logs)

    @model_validator(mode="before")
    @classmethod
    def _with_secret_files(cls, tree: dict[str, Any]) -> dict[str, Any]:
        return secrets.read_files(tree, _fields())

    @property
    def model(self) -> str:
        """The name under which the target is asked for."""
        return self.target.model or self.target.path

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        below = InitSettingsSource(settings_cls, getattr(settings_cls, "below", {}))
        return init_settings, env_settings, TomlConfigSettingsSource(settings_cls), below


def load(
    file: str | Path | None = None,
    flags: Mapping[str, Any] | None = None,
    *,
    below: Mapping[str, Mapping[str, Any]] | None = None,
) -> Settings:
    """Read the file (`draftfleet.toml` if it is there and none is named), then the environment, then the flags.

    `flags` maps dotted paths to values, as in `{"worker.concurrency": 48}`. `below` are sections that all of these win
    over. Raises SettingsError.
    """
    path = Path(file) if file else DEFAULT_FILE
    if file and not path.is_file():
        raise SettingsError(f"settings file {path} is not there: name an existing TOML file, or leave the flag out.")
    fields = _fields()
    if wrong := mistakes.unknown_variable(ENV_PREFIX, fields):
        raise SettingsError(wrong)
    layers: dict[str, Any] = {"model_config": SettingsConfigDict(toml_file=path), "below": dict(below or {})}
    layers["__annotations__"] = {"below": ClassVar[dict[str, Any]]}
    with_file = type("Settings", (Settings,), layers)
    try:
        settings = cast(Settings, with_file(**_nested(flags or {})))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path} is not TOML in UTF-8: {error}") from None
    except pydantic_settings.SettingsError:
        raise SettingsError(mistakes.not_json(ENV_PREFIX, fields)) from None
    except ValidationError as error:
        said = dict.fromkeys(mistakes.explain(one, fields, path) for one in error.errors())
        raise SettingsError("\n".join(said)) from None
    redaction.remember(secrets.values(settings))
    return settings


def assignment(text: str) -> tuple[str, Any]:
    """`worker.concurrency=48` as a path and a value; the value is read as TOML, and as a plain string if it is none."""
    path, sign, value = text.partition("=")
    if not sign:
        raise SettingsError(f"--set {text}: write it as section.key=value, for example worker.concurrency=48.")
    secrets.refuse_flag(path.strip(), value, _fields())
    try:
        return path.strip(), tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return path.strip(), value


def environment(settings: Settings) -> dict[str, str]:
    """This process' environment with these settings in it, for a child: secrets travel in no argument list.

    What was read from a file is not among them: the child reads it there.
    """
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(ENV_PREFIX)}
    values = {name: _plain(getattr(settings, name)) for name in Settings.model_fields}
    texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in values.items()}
    return inherited | {ENV_PREFIX + name.upper(): text for name, text in texts.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, Section):
        names = type(value).model_fields
        return {name: _plain(getattr(value, name)) for name in names if not getattr(value, name + secrets.FILE, None)}
    if isinstance(value, list):
        return [_plain(one) for one in cast(list[Any], value)]
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in cast(dict[str, Any], value).items()}
    return value.get_secret_value() if isinstance(value, SecretStr) else value


def describe() -> Iterator[tuple[str, FieldInfo]]:
    """Every knob as its dotted path and its pydantic field: for the reference page and for `draftfleet settings`.

    The keys of a knob that is a list of tables follow its section, as `producer.sources[].weight`.
    """
    for name, field in Settings.model_fields.items():
        section = field.annotation
        if isinstance(section, type) and issubclass(section, Section):
            yield from ((f"{name}.{key}", value) for key, value in section.model_fields.items())
            for key, value in section.model_fields.items():
                if (table := table_of(value)) is not None:
                    yield from ((f"{name}.{key}[].{inner}", knob) for inner, knob in table.model_fields.items())
        else:
            yield name, field


def _fields() -> dict[str, FieldInfo]:
    return dict(describe())


def _nested(flags: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, value in flags.items():
        *sections, key = path.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
            if not isinstance(node, dict):
                raise SettingsError(mistakes.unknown(path, "settings", _fields()))
        node[key] = value
    return tree
