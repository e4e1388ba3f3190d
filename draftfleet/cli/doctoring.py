"""The verb that looks for what would spoil a run, before it starts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from draftfleet.cli.role import role, shows_bars
from draftfleet.errors import SettingsError
from draftfleet.flags import Bool, Config, Int, Model, Progress, Run, Servers, Set, Storage, Target, Text, read

if TYPE_CHECKING:
    from draftfleet.settings import Settings


def doctor(
    ctx: typer.Context,
    data: Annotated[
        list[str] | None,
        typer.Argument(metavar="DATA", help="What will be produced: its first prompts are asked."),
    ] = None,
    *,
    servers: Servers = None,
    model: Model = None,
    target: Target = None,
    dialect: Annotated[Text, typer.Option(metavar="NAME", help="Unset: found by itself.")] = None,
    max_tokens: Annotated[Int, typer.Option(metavar="N", help="Longest completion, reasoning included.")] = None,
    thinking: Annotated[Bool, typer.Option(help="Reasoning on or off. Unset: the template decides.")] = None,
    checks_target: Annotated[
        bool, typer.Option("--check-target", help="Look at the trainer's hidden states instead, in numbers.")
    ] = False,
    records: Annotated[bool, typer.Option("--show", help="Show the canary's prompts and answers, too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
    is_strict: Annotated[bool, typer.Option("--strict", help="Exit with 1 on a warning, too.")] = False,
    progress: Progress = None,
    config: Config = None,
    run: Run = None,
    storage: Storage = None,
    assign: Set = None,
) -> None:
    """Look for what would spoil a run, before it starts.

    In under a minute: settings, Redis, storage, servers, tokenizer, timeouts, old processes, eight real prompts.
    Exit code 0 if there is no fault, else 1.
    """
    try:
        settings: Settings | SettingsError = read(ctx)
    except SettingsError as error:
        settings = error
    if checks_target:
        found = role("target doctor")(
            settings, look=role("target look"), as_json=as_json, strict=is_strict, progress=shows_bars(progress)
        )
        raise typer.Exit(found)
    found = role("doctor")(
        settings,
        file=str(file) if (file := config or Path("draftfleet.toml")).is_file() else "",
        first_prompts=role("prompts"),
        pins=role("pins"),
        as_json=as_json,
        strict=is_strict,
        records=records,
        progress=shows_bars(progress),
    )
    raise typer.Exit(found)
