"""The verb that writes what a run did as one page."""

from __future__ import annotations

from typing import Annotated

import typer

from draftfleet import results
from draftfleet.cli.role import role, shows_bars
from draftfleet.flags import Config, Float, Progress, Set, Storage, Target, Text, read

RunName = Annotated[Text, typer.Argument(metavar="RUN", help="Unset: the run that the settings name.")]


def report(
    ctx: typer.Context,
    run: RunName = None,
    *,
    out: Annotated[Text, typer.Option(metavar="FILE", help="Replaced if it is there. Unset: RUN.html.")] = None,
    gpus: Annotated[Float, typer.Option("--gpus-per-server", metavar="N", help="For the cost. Unset: 1.")] = None,
    price: Annotated[Float, typer.Option(metavar="X", help="Of an hour of one GPU, in your currency.")] = None,
    drawn: Annotated[
        int,
        typer.Option(
            "--samples", metavar="N", help="Rows by lot in the browser; the extremes come beside them. 0: none."
        ),
    ] = 100,
    lot: Annotated[int, typer.Option("--seed", metavar="N", help="Of the lot.")] = 0,
    opens: Annotated[bool, typer.Option("--open", help="Open it in the browser.")] = False,
    target: Target = None,
    progress: Progress = None,
    config: Config = None,
    storage: Storage = None,
    assign: Set = None,
) -> None:
    """Write what a run did as one HTML file.

    It needs no network and no other file. Of a run that goes on it is a snapshot. Exit code 1 if a shard could not be
    read: the rest is in it.
    """
    settings = read(ctx)
    from draftfleet.errors import SettingsError  # noqa: PLC0415
    from draftfleet.report import Options  # noqa: PLC0415

    for flag, value, rule in (
        ("--gpus-per-server", gpus, gpus is None or gpus > 0),
        ("--price", price, price is None or price >= 0),
        ("--samples", drawn, 0 <= drawn <= 2000),
    ):
        if not rule:
            raise SettingsError(
                f"{flag} {value}: use a number {'from 0 to 2000' if flag == '--samples' else 'above 0'}."
            )
    options = Options(file=out, gpus_per_server=gpus, price=price, samples=drawn, seed=lot, opens=opens)
    said = role("report")(settings, options, progress=shows_bars(progress))
    results.show(settings.run, f"report written to {said.file}", said)
    if said.corrupt:
        raise typer.Exit(1)
