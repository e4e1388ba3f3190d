"""The verbs on dead letters: `draftfleet dead list`, `show`, `revive` and `export`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from draftfleet import results
from draftfleet.cli.role import role
from draftfleet.flags import Config, Int, Run, Set, Storage, Text, read

if TYPE_CHECKING:
    from draftfleet.letters import Filter

Kind = Annotated[
    list[str] | None,
    typer.Option(metavar="KIND", help="bad_request, transient, unusable, crash, worker or unreadable. Repeatable."),
]
Status = Annotated[Int, typer.Option(metavar="N", help="HTTP status.")]
Server = Annotated[Text, typer.Option(metavar="TEXT", help="In the server's address.")]
Contains = Annotated[Text, typer.Option(metavar="TEXT", help="In the message.")]
Batch = Annotated[Text, typer.Option(metavar="NAME", help="A batch, with its single rows.")]
Since = Annotated[Text, typer.Option(metavar="WHEN", help="30m, 2h, 7d ago, or a date as in 2026-07-31T12:00.")]
Split = Annotated[Text, typer.Option(metavar="NAME", help="train or heldout.")]


def list_letters(
    ctx: typer.Context,
    *,
    kind: Kind = None,
    status: Status = None,
    server: Server = None,
    contains: Contains = None,
    batch: Batch = None,
    since: Since = None,
    split: Split = None,
    most: Annotated[Int, typer.Option("--limit", metavar="N", help="Unset: 50 in the table, all as JSON.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs: one line per letter.")] = False,
    config: Config = None,
    run: Run = None,
    storage: Storage = None,
    assign: Set = None,
) -> None:
    """List dead letters, then how many there are of each kind."""
    raise typer.Exit(role("dead list")(read(ctx), _wanted(ctx), limit=most, as_json=as_json))


def show(
    ctx: typer.Context,
    row: Annotated[str, typer.Argument(metavar="ROW", help="Beginning of a row key, or of the name of a dead batch.")],
    *,
    config: Config = None,
    run: Run = None,
    storage: Storage = None,
    assign: Set = None,
) -> None:
    """Show all of one dead letter.

    Its prompt is printed, too.
    """
    raise typer.Exit(role("dead show")(read(ctx), row))


def revive(
    ctx: typer.Context,
    *,
    kind: Kind = None,
    status: Status = None,
    server: Server = None,
    contains: Contains = None,
    batch: Batch = None,
    since: Since = None,
    split: Split = None,
    every: Annotated[bool, typer.Option("--all", help="All of them.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say how many.")] = False,
    config: Config = None,
    run: Run = None,
    storage: Storage = None,
    assign: Set = None,
) -> None:
    """Have rows asked again.

    Rows that are being asked again already are left out.
    """
    settings = read(ctx)
    said = role("dead revive")(settings, _wanted(ctx), every=every, dry_run=dry_run)
    results.show(settings.run, "would revive" if dry_run else "revived", said)


def export(
    ctx: typer.Context,
    file: Annotated[str, typer.Argument(metavar="FILE", help="JSON Lines. -: standard output.")],
    *,
    kind: Kind = None,
    status: Status = None,
    server: Server = None,
    contains: Contains = None,
    batch: Batch = None,
    since: Since = None,
    split: Split = None,
    config: Config = None,
    run: Run = None,
    storage: Storage = None,
    assign: Set = None,
) -> None:
    """Write rows as a data set, each with its error."""
    settings = read(ctx)
    said = role("dead export")(settings, _wanted(ctx), file)
    if file != "-":
        results.show(settings.run, "exported", said)


def _wanted(ctx: typer.Context) -> Filter:
    from draftfleet import letters  # noqa: PLC0415  brings pyarrow, which the help can do without

    given: dict[str, Any] = ctx.params
    return letters.Filter(
        kind=tuple(given["kind"] or ()),
        status=given["status"],
        server=given["server"],
        contains=given["contains"],
        batch=given["batch"],
        since=None if given["since"] is None else letters.since(given["since"]),
        split=given["split"],
    )
