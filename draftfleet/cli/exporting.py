"""The verb that hands the samples on to other programs."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

import typer

from draftfleet import results
from draftfleet.cli.role import role, shows_bars
from draftfleet.flags import Config, Int, Progress, Run, Set, Storage, Text, read

ASKED: tuple[Literal["ok"], Literal["truncated"]] = ("ok", "truncated")
"""Outcomes that can be exported: a failed answer has nothing to train on."""


class Splits(StrEnum):
    train = "train"
    heldout = "heldout"
    both = "both"


class Lines(StrEnum):
    rows = "rows"
    conversations = "conversations"


class Thoughts(StrEnum):
    field = "field"
    inline = "inline"


def export_data(
    ctx: typer.Context,
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help="Where to; a new folder.")],
    *,
    form: Annotated[
        str,
        typer.Option(
            "--format", metavar="NAME", help="jsonl, jsonl.zst, parquet, arrow (for datasets), specforge, speculators."
        ),
    ] = "parquet",
    lines: Annotated[Lines, typer.Option("--turns", help="A line per answer, or per conversation.")] = Lines.rows,
    part: Annotated[Splits, typer.Option("--split", help="Which prompts.")] = Splits.both,
    outcomes: Annotated[
        str, typer.Option(metavar="NAME[,NAME]", help="Of which outcome: ok, truncated.")
    ] = "ok,truncated",
    exact: Annotated[bool, typer.Option("--exact", help="Only answers whose ids the engine gave.")] = False,
    thoughts: Annotated[
        Thoughts, typer.Option("--reasoning", help="In a field of its own, or inside the content.")
    ] = Thoughts.field,
    most: Annotated[Int, typer.Option("--limit", metavar="N", help="Lines of each split. Unset: all.")] = None,
    file_mb: Annotated[int, typer.Option(metavar="N", help="Megabytes of a file, about.")] = 512,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier export.")] = False,
    hub: Annotated[
        Text, typer.Option("--push-to-hub", metavar="ORG/NAME", help="Upload it, too. The token is HF_TOKEN.")
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="Make the repository a private one.")] = False,
    revision: Annotated[Text, typer.Option(metavar="BRANCH", help="Upload to this branch.")] = None,
    licence: Annotated[Text, typer.Option("--license", metavar="ID", help="For the card: apache-2.0, ...")] = None,
    progress: Progress = None,
    config: Config = None,
    run: Run = None,
    storage: Storage = None,
    assign: Set = None,
) -> None:
    """Write the samples as a data set, with a data card.

    Exit code 1 if a shard could not be read: the rest is written.
    """
    settings = read(ctx)
    from draftfleet.errors import SettingsError  # noqa: PLC0415
    from draftfleet.export_data.units import Wanted  # noqa: PLC0415
    from draftfleet.hub import Place  # noqa: PLC0415

    named = tuple(name.strip() for name in outcomes.split(",") if name.strip())
    kept: tuple[Literal["ok", "truncated"], ...] = tuple(one for one in ASKED if one in named)
    if not kept or set(named) - set(ASKED):
        raise SettingsError(f"--outcomes {outcomes}: use ok, truncated, or both with a comma between.")
    if hub is None and (private or revision):
        raise SettingsError("--private and --revision are of an upload: name the repository with --push-to-hub.")
    wanted = Wanted(
        format=form,
        splits=("train", "heldout") if part is Splits.both else (part.value,),
        outcomes=kept,
        exact=exact,
        turns=lines.value,
        reasoning=thoughts.value,
        limit=most,
        file_mb=file_mb,
    )
    said = role("export-data")(
        settings,
        folder,
        wanted,
        overwrite=overwrite,
        hub=None if hub is None else Place(repo=hub, private=private, revision=revision),
        license=licence,
        progress=shows_bars(progress),
    )
    results.show(settings.run, "exported" if said.complete else "exported, of a run that is not complete", said)
    if said.corrupt:
        raise typer.Exit(1)
