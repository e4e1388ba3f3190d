"""The verbs that show what is there."""

from __future__ import annotations

from typing import Annotated

import typer

from draftfleet import completing
from draftfleet.cli.role import role, shows_bars
from draftfleet.flags import (
    Config,
    Int,
    Progress,
    Run,
    Set,
    Storage,
    Text,
    read,
)


def status(
    ctx: typer.Context,
    *,
    watch: Annotated[bool, typer.Option("--watch", help="Stay, and draw it again as it changes.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
    repair: Annotated[
        bool, typer.Option("--repair", help="Publish again what is missing; move corrupt shards aside.")
    ] = False,
    config: Config = None,
    run: Run = None,
    storage: Storage = None,
    assign: Set = None,
) -> None:
    """Show how far a run is."""
    raise typer.Exit(role("status")(read(ctx), watch=watch, as_json=as_json, repair=repair))


def verify(
    ctx: typer.Context,
    *,
    run: Annotated[
        Text,
        typer.Argument(metavar="RUN", help="Unset: the run that the settings name.", autocompletion=completing.runs),
    ] = None,
    repair: Annotated[
        bool, typer.Option("--repair", help="Move shards at fault aside and have their batches done again.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
    progress: Progress = None,
    config: Config = None,
    storage: Storage = None,
    assign: Set = None,
) -> None:
    """Read every shard of a run again and say what is not sound.

    Exit code 0 if all is sound. It may run at any time, beside producers, workers and trainers.
    """
    raise typer.Exit(role("verify")(read(ctx), repair=repair, as_json=as_json, progress=shows_bars(progress)))


def presets(
    ctx: typer.Context,
    *,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
    config: Config = None,
    run: Run = None,
    storage: Storage = None,
    assign: Set = None,
) -> None:
    """List the data sets that are known by name.

    `draftfleet produce preset:NAME` reads one.
    """
    raise typer.Exit(role("presets")(read(ctx), as_json=as_json))


def flower(
    ctx: typer.Context,
    *,
    address: Annotated[Text, typer.Option(metavar="HOST", help="Where it listens.")] = None,
    port: Annotated[Int, typer.Option(metavar="N", help="0: any free port.")] = None,
    config: Config = None,
    run: Run = None,
    storage: Storage = None,
    assign: Set = None,
) -> None:
    """Serve the web page on workers and tasks."""
    raise typer.Exit(role("flower")(read(ctx)))


def list_settings(
    ctx: typer.Context,
    *,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="The reference page, without your values.")] = False,
    config: Config = None,
    run: Run = None,
    storage: Storage = None,
    assign: Set = None,
) -> None:
    """List every knob with its value.

    The output is a settings file: meaning and default stand in comments, secrets are left out.
    """
    from draftfleet import reference  # noqa: PLC0415  brings pydantic and pyarrow, which the help can do without

    if markdown:
        typer.echo(reference.as_markdown(), nl=False)
    else:
        typer.echo((reference.as_json if as_json else reference.as_toml)(read(ctx)))
