"""The verb that lets cut answers go on."""

from __future__ import annotations

from typing import Annotated

import typer

from draftfleet import completing, results
from draftfleet.cli.role import role
from draftfleet.flags import Config, Set, Storage, Text, read


def continue_(
    ctx: typer.Context,
    *,
    run: Annotated[
        Text,
        typer.Argument(metavar="RUN", help="Unset: the run that the settings name.", autocompletion=completing.runs),
    ] = None,
    budget: Annotated[
        int, typer.Option("--max-tokens", metavar="N", help="Of each whole answer, what is there included.")
    ],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say how many.")] = False,
    config: Config = None,
    storage: Storage = None,
    assign: Set = None,
) -> None:
    """Let answers go on that were cut at their length.

    From their exact token ids, by a server that takes ids. Where that fails, the cut answer stands.
    """
    settings = read(ctx)
    said = role("continue")(settings, max_tokens=budget, dry_run=dry_run)
    results.show(settings.run, "would continue" if dry_run else "continuing", said)
