"""The verbs that order: runs are paused, ranked, limited and deleted, nodes drained, all from afar."""

from __future__ import annotations

from typing import Annotated

import typer

from draftfleet import completing, results
from draftfleet.cli.role import role
from draftfleet.errors import SettingsError
from draftfleet.flags import Config, Run, Set, Storage, Text, read

RunName = Annotated[
    Text,
    typer.Argument(metavar="RUN", help="Unset: the run that the settings name.", autocompletion=completing.runs),
]
Reason = Annotated[str, typer.Option(metavar="TEXT", help="Shown by `draftfleet status`.")]


def pause(
    ctx: typer.Context,
    run: RunName = None,
    *,
    reason: Reason = "",
    config: Config = None,
    storage: Storage = None,
    assign: Set = None,
) -> None:
    """Start no more rows of a run, until it is resumed.

    Rows in flight may finish within the workers' `worker.drain_s`. Other runs go on.
    """
    settings = read(ctx)
    results.show(settings.run, role("pause")(settings, reason=reason), {"reason": reason})


def resume(
    ctx: typer.Context,
    run: RunName = None,
    *,
    config: Config = None,
    storage: Storage = None,
    assign: Set = None,
) -> None:
    """Go on with a run that was paused or cancelled."""
    settings = read(ctx)
    results.show(settings.run, role("resume")(settings), {})


def cancel(
    ctx: typer.Context,
    run: RunName = None,
    *,
    reason: Reason = "",
    config: Config = None,
    storage: Storage = None,
    assign: Set = None,
) -> None:
    """End a run with the samples that it has.

    Its requests are broken off, and a trainer takes what there is for all. Nothing is deleted.
    """
    settings = read(ctx)
    results.show(settings.run, role("cancel")(settings, reason=reason), {"reason": reason})


def drain(
    ctx: typer.Context,
    node: Annotated[
        Text,
        typer.Argument(
            metavar="NODE", help="A host or process, as `status` shows it.", autocompletion=completing.nodes
        ),
    ] = None,
    *,
    all_nodes: Annotated[bool, typer.Option("--all", help="Every live worker.")] = False,
    wait: Annotated[bool, typer.Option(help="Until they are gone, with the rows in flight.")] = True,
    config: Config = None,
    run: Run = None,
    storage: Storage = None,
    assign: Set = None,
) -> None:
    """Have workers finish what is in flight and end; others take over."""
    names = role("drain")(read(ctx), node=node, all_nodes=all_nodes, wait=wait)
    results.show(None, "drained" if wait else "told to drain", {"workers": names})


def list_runs(
    ctx: typer.Context,
    *,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
    config: Config = None,
    storage: Storage = None,
    assign: Set = None,
) -> None:
    """List the runs in the storage with their rows and drafters."""
    raise typer.Exit(role("runs list")(read(ctx), as_json=as_json))


def priority(
    ctx: typer.Context,
    run: RunName = None,
    rank: Annotated[str, typer.Argument(metavar="PRIORITY", help="high, normal or low.")] = "normal",
    *,
    config: Config = None,
    storage: Storage = None,
    assign: Set = None,
) -> None:
    """Put a run before others or behind them."""
    settings = read(ctx)
    results.show(settings.run, role("runs priority")(settings, priority=rank), {"priority": rank})


def budget(
    ctx: typer.Context,
    run: RunName = None,
    tokens: Annotated[str, typer.Argument(metavar="N", help="Completion tokens, or none.")] = "none",
    *,
    config: Config = None,
    storage: Storage = None,
    assign: Set = None,
) -> None:
    """Change the tokens after which a run is paused."""
    settings, budgeted = read(ctx), _tokens(tokens)
    results.show(settings.run, role("runs budget")(settings, tokens=budgeted), {"token_budget": budgeted})


def delete(
    ctx: typer.Context,
    run: RunName = None,
    *,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    config: Config = None,
    storage: Storage = None,
    assign: Set = None,
) -> None:
    """Delete a run with its samples and drafters, for good.

    Interrupted, it is gone on with by the same command.
    """
    settings = read(ctx)
    if not yes:
        typer.confirm(
            f"Delete run {settings.run} in {settings.storage.url} with its samples and drafters?", abort=True, err=True
        )
    results.show(settings.run, role("runs delete")(settings), {})


def _tokens(text: str) -> int | None:
    if text == "none":
        return None
    if not text.replace("_", "").isdecimal() or not int(text):
        raise SettingsError(f"budget {text}: it is a whole number of tokens above 0, or none.")
    return int(text)
