"""Flags: short names for settings paths, so that a flag, a line of TOML and an environment variable say the same."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from draftfleet import completing, logs

if TYPE_CHECKING:
    from draftfleet.settings import Settings

FLAGS = {
    "run": "run",
    "storage": "storage.url",
    "model": "target.model",
    "target": "target.path",
    "data": "producer.data",
    "split": "producer.split",
    "subset": "producer.subset",
    "revision": "producer.revision",
    "column": "producer.column",
    "split_column": "producer.split_column",
    "heldout": "producer.heldout",
    "batch_size": "producer.batch_size",
    "limit": "producer.limit",
    "sample": "producer.sample",
    "seed": "producer.seed",
    "language": "producer.languages",
    "strict": "producer.strict",
    "priority": "producer.priority",
    "token_budget": "producer.token_budget",
    "max_tokens": "sampling.max_tokens",
    "temperature": "sampling.temperature",
    "thinking": "sampling.thinking",
    "samples": "sampling.n",
    "servers": "worker.servers",
    "concurrency": "worker.concurrency",
    "dialect": "worker.dialect",
    "drafter": "trainer.drafter",
    "max_steps": "trainer.max_steps",
    "lr": "trainer.lr",
    "device": "trainer.device",
    "k": "evaluation.k",
    "prompts": "evaluation.prompts",
    "at_temperature": "evaluation.temperature",
    "address": "flower.address",
    "port": "flower.port",
}
"""From flag to settings path. A flag that is not given leaves its knob alone."""

LONG_VERBS = ("generate", "produce", "work", "join", "trainer", "up", "flower")
"""Those that have a log file."""

Text: TypeAlias = str | None
Int: TypeAlias = int | None
Float: TypeAlias = float | None
Bool: TypeAlias = bool | None

# Of every verb.
Config = Annotated[Path | None, typer.Option(metavar="FILE", help="Settings. Unset: draftfleet.toml, if there.")]
Run = Annotated[
    Text, typer.Option(metavar="NAME", help="The run: its folder in the storage.", autocompletion=completing.runs)
]
Storage = Annotated[Text, typer.Option(metavar="URL", help="What all nodes share: a folder or s3://BUCKET/PREFIX.")]
Set = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any knob: worker.drain_s=30. Repeatable.")
]

# Of several.
Model = Annotated[Text, typer.Option(metavar="NAME", help="The target, as its servers call it.")]
Target = Annotated[Text, typer.Option(metavar="PATH", help="Folder or hub name of the target's weights.")]
Servers = Annotated[
    list[str] | None, typer.Option(metavar="URL[,URL...]", help="Local inference servers, without /v1. Repeatable.")
]
Concurrency = Annotated[Int, typer.Option(metavar="N", help="Requests in flight per server. Unset: adaptive.")]
Drafter = Annotated[
    Text, typer.Option(metavar="NAME", help="The drafter: its folder in the run.", autocompletion=completing.drafters)
]
Progress = Annotated[Bool, typer.Option(help="Bars on standard error. Unset: on a terminal.")]


def read(ctx: typer.Context, implied: Mapping[str, Any] | None = None) -> Settings:
    """What the flags of this call say, over environment and file. A named flag wins over `--set`.

    `implied` is what the verb means by its own flags: it wins over environment and file, any other flag over it.
    """
    from draftfleet.settings import load  # noqa: PLC0415  brings pydantic and pyarrow, which the help can do without

    settings = load(ctx.params["config"], {**(implied or {}), **said(ctx)})
    begin_log(ctx, settings)
    return settings


def said(ctx: typer.Context) -> dict[str, Any]:
    """The flags of this call alone, by settings path."""
    from draftfleet.settings import assignment  # noqa: PLC0415  brings pydantic and pyarrow, which the help can do without

    given = ctx.params
    flags = dict(map(assignment, given["assign"] or []))
    flags |= {FLAGS[name]: value for name, value in given.items() if name in FLAGS and value not in (None, (), [])}
    for name in ("servers", "language"):
        if given.get(name):
            flags[FLAGS[name]] = [one.strip() for part in given[name] for one in part.split(",") if one.strip()]
    if given.get("k"):
        flags |= _drafted(given["k"])
    if given.get("data"):
        flags["producer.data"] = given["data"][0] if len(given["data"]) == 1 else list(given["data"])
    return flags


def _drafted(text: str) -> dict[str, Any]:
    """`--k 1,3,7`: the largest is the one that is looked at closely, the others are swept."""
    ks = sorted({part.strip() for part in text.split(",")}, key=lambda part: (len(part), part))
    return {FLAGS["k"]: ks[-1]} | ({"evaluation.sweep": ks[:-1]} if len(ks) > 1 else {})


def begin_log(ctx: typer.Context, settings: Settings) -> None:
    """From here on as the settings say, also when they are read again. Short verbs leave the file to the long ones."""
    verb, knobs = str(ctx.info_name), settings.logs
    file = (knobs.file or "").replace("{verb}", verb).replace("{host}", socket.gethostname())
    logs.setup(
        "DEBUG" if ctx.find_root().params.get("debug") else knobs.level,
        as_json=knobs.format == "json",
        file=Path(file.replace("{pid}", str(os.getpid()))) if file and verb in LONG_VERBS else None,
        max_mb=knobs.max_mb,
        keep=knobs.keep,
    )
