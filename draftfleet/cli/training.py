"""The verbs that make a drafter of the samples."""

from __future__ import annotations

from typing import Annotated

import typer

from draftfleet import results
from draftfleet.cli.role import role, shows_bars
from draftfleet.flags import (
    Config,
    Drafter,
    Float,
    Int,
    Progress,
    Run,
    Set,
    Storage,
    Target,
    Text,
    read,
)


def train(
    ctx: typer.Context,
    *,
    drafter: Drafter = None,
    target: Target = None,
    max_steps: Annotated[Int, typer.Option(metavar="N", help="Optimizer steps.")] = None,
    lr: Annotated[Float, typer.Option(metavar="X", help="Peak learning rate.")] = None,
    config: Config = None,
    run: Run = None,
    storage: Storage = None,
    assign: Set = None,
) -> None:
    """Queue the training of a drafter.

    It may start before its samples are there: it follows them as they come.
    """
    settings = read(ctx)
    said = role("train")(settings)
    results.show(settings.run, said, {"drafter": settings.trainer.drafter})


def trainer(
    ctx: typer.Context,
    *,
    target: Target = None,
    device: Annotated[Text, typer.Option(metavar="NAME", help="auto, cpu or cuda.")] = None,
    config: Config = None,
    run: Run = None,
    storage: Storage = None,
    assign: Set = None,
) -> None:
    """Train on this node what is queued."""
    raise typer.Exit(role("trainer")(read(ctx)))


def capture_command(
    ctx: typer.Context,
    *,
    target: Target = None,
    config: Config = None,
    run: Run = None,
    storage: Storage = None,
    assign: Set = None,
) -> None:
    """Print the command that starts a vLLM server for trainer.target = vllm.

    It has the layers of this drafter. Add what your machine needs, such as --tensor-parallel-size.
    """
    typer.echo(role("capture-command")(read(ctx)))


def evaluate(
    ctx: typer.Context,
    *,
    drafter: Drafter = None,
    target: Target = None,
    k: Annotated[
        Text, typer.Option(metavar="N[,N...]", help="Tokens drafted per pass; several are measured beside each other.")
    ] = None,
    prompts: Annotated[Int, typer.Option(metavar="N", help="Held-out prompts.")] = None,
    at_temperature: Annotated[
        Float, typer.Option("--temperature", metavar="X", help="0: greedy. Above: answers are sampled.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs: one JSON line, no table.")] = False,
    which: Annotated[
        str,
        typer.Option(
            "--checkpoint",
            metavar="NAME",
            help="best, latest, a step, or all: measure each and name the best. Unset: the best if measured.",
        ),
    ] = "",
    progress: Progress = None,
    config: Config = None,
    run: Run = None,
    storage: Storage = None,
    assign: Set = None,
) -> None:
    """Measure a drafter on held-out prompts.

    The table goes to standard error, the same as one JSON line to standard output unless that is a terminal.
    """
    settings = read(ctx)
    if which == "all":
        results.show(settings.run, "measured", role("every checkpoint")(settings))
        return
    evaluation = role("evaluate")(settings, progress=shows_bars(progress), which=which)
    from draftfleet import acceptance  # noqa: PLC0415  brings rich

    acceptance.show(evaluation, as_json=as_json)


def export(
    ctx: typer.Context,
    *,
    drafter: Drafter = None,
    target: Target = None,
    formats: Annotated[
        list[str] | None,
        typer.Option("--format", metavar="NAME", help="vllm, sglang or speculators. Repeatable. Unset: all."),
    ] = None,
    which: Annotated[
        str,
        typer.Option(
            "--checkpoint", metavar="NAME", help="best, latest or a step. Unset: the best if measured, else the latest."
        ),
    ] = "",
    hub: Annotated[
        Text, typer.Option("--push-to-hub", metavar="ORG/NAME", help="Upload it, too. The token is HF_TOKEN.")
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="Make the repository a private one.")] = False,
    revision: Annotated[Text, typer.Option(metavar="BRANCH", help="Upload to this branch.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what is in the repository.")] = False,
    licence: Annotated[
        Text, typer.Option("--license", metavar="ID", help="For the card: apache-2.0, ... Unset: the target's.")
    ] = None,
    config: Config = None,
    run: Run = None,
    storage: Storage = None,
    assign: Set = None,
) -> None:
    """Write the folders that engines serve."""
    settings = read(ctx)
    from draftfleet.errors import SettingsError  # noqa: PLC0415
    from draftfleet.hub import Place  # noqa: PLC0415  an upload is rare

    if hub is None and (private or revision or overwrite):
        raise SettingsError("--private, --revision and --overwrite are of an upload: name one with --push-to-hub.")
    said = role("export")(
        settings,
        formats or [],
        hub=None if hub is None else Place(repo=hub, private=private, revision=revision, kind="model"),
        overwrite=overwrite,
        license=licence,
        which=which,
    )
    results.show(settings.run, "exported", said)
