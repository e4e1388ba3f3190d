"""The verb that brings in responses for which somebody has paid: `draftfleet import-data`."""

from __future__ import annotations

from typing import Annotated

import typer

from draftfleet import results
from draftfleet.cli.role import role, shows_bars
from draftfleet.flags import Bool, Config, Progress, Run, Set, Storage, Target, Text, read


def import_data(
    ctx: typer.Context,
    files: Annotated[
        list[str] | None,
        typer.Argument(metavar="FILE...", help=".jsonl, .jsonl.gz, .jsonl.zst, .parquet, or a folder."),
    ] = None,
    *,
    form: Annotated[Text, typer.Option("--format", metavar="NAME", help="Unset: found by itself.")] = None,
    trust_text: Annotated[
        Bool, typer.Option(help="Whether to train on rows with neither token ids nor a count of tokens.")
    ] = None,
    any_model: Annotated[
        bool, typer.Option("--any-model", help="Take rows that name another model than the run's.")
    ] = False,
    unmatched: Annotated[
        Text, typer.Option(metavar="FILE", help="Where rows go that answer no prompt of the run.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be imported.")] = False,
    target: Target = None,
    progress: Progress = None,
    config: Config = None,
    run: Run = None,
    storage: Storage = None,
    assign: Set = None,
) -> None:
    """Make responses that were paid for samples of a run.

    The run then asks only for what is missing. Importing a file twice adds nothing.
    """
    settings = read(ctx)
    report = role("import-data")(
        settings,
        files or [],
        form=form,
        unmatched=unmatched,
        any_model=any_model,
        trust_text=trust_text,
        dry_run=dry_run,
        progress=shows_bars(progress),
    )
    results.show(settings.run, "would import" if dry_run else "imported", report)
