"""`draftfleet VERB`: read the flags, load the settings, import the role and hand over.

Roles are named as text (`ROLES`) and imported once the flags are read: the help needs none of them.

What a verb has to tell goes to standard error; its result is one JSON line on standard output.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import draftfleet
from draftfleet import logs, results
from draftfleet.errors import DraftfleetError
from draftfleet.flags import (
    Bool,
    Concurrency,
    Config,
    Drafter,
    Float,
    Int,
    Model,
    Progress,
    Run,
    Servers,
    Set,
    Storage,
    Target,
    Text,
    read,
)

ROLES = {
    "produce": "producer.produce:produce",
    "work": "workers.app:work",
    "train": "trainer.tasks:enqueue",
    "trainer": "trainer.app:serve",
    "evaluate": "trainer.evaluate:evaluate",
    "export": "trainer.export:export",
    "status": "draftfleet.status:show",
    "up": "draftfleet.up:up",
    "flower": "draftfleet.flower:serve",
}
"""From verb to module and function."""


class Verbs(TyperGroup):
    """Turns what the user can mend into one line and an exit code, without a traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except DraftfleetError as error:
            if ctx.params["debug"]:
                raise
            typer.echo(f"draftfleet: {error}", err=True)
            raise typer.Exit(error.exit_code) from None
        except KeyboardInterrupt:
            raise typer.Exit(130) from None


app = typer.Typer(
    cls=Verbs,
    help="Make a drafter for your own large model: ask it your prompts, store its answers, train on them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.callback(invoke_without_command=True)
def common(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Log more, and show the traceback of an error.")] = False,
) -> None:
    if version:
        typer.echo(f"draftfleet {draftfleet.__version__}")
        raise typer.Exit
    logs.setup("DEBUG" if debug else "INFO")


@app.command()
def produce(
    ctx: typer.Context,
    data: Annotated[
        Text, typer.Argument(metavar="DATA", help=".jsonl, .jsonl.gz, .parquet, or a `datasets` name.")
    ] = None,
    *,
    model: Model = None,
    target: Target = None,
    column: Annotated[
        Text, typer.Option(metavar="NAME", help="With the conversations. Unset: found by itself.")
    ] = None,
    split_column: Annotated[Text, typer.Option(metavar="NAME", help="That says train or heldout.")] = None,
    heldout: Annotated[Float, typer.Option(metavar="SHARE", help="Held out by hash.")] = None,
    batch_size: Annotated[Int, typer.Option(metavar="N", help="Prompts per batch.")] = None,
    limit: Annotated[Int, typer.Option(metavar="N", help="Read at most N lines.")] = None,
    strict: Annotated[Bool, typer.Option("--strict", help="Stop at the first malformed line.")] = None,
    max_tokens: Annotated[Int, typer.Option(metavar="N", help="Longest completion, reasoning included.")] = None,
    temperature: Annotated[Float, typer.Option(metavar="X", help="Unset: the server's default.")] = None,
    thinking: Annotated[Bool, typer.Option(help="Reasoning on or off. Unset: the template decides.")] = None,
    progress: Progress = None,
    config: Config = None,
    run: Run = None,
    storage: Storage = None,
    assign: Set = None,
) -> None:
    """Put the prompts of a data set into the queue."""
    settings = read(ctx)
    results.show(settings.run, "produced", _role("produce")(settings, progress=_shows_bars(progress)))


@app.command()
def work(
    ctx: typer.Context,
    *,
    servers: Servers = None,
    concurrency: Concurrency = None,
    model: Model = None,
    target: Target = None,
    dialect: Annotated[Text, typer.Option(metavar="NAME", help="Unset: found by itself.")] = None,
    config: Config = None,
    run: Run = None,
    storage: Storage = None,
    assign: Set = None,
) -> None:
    """Ask this node's servers what is queued."""
    raise typer.Exit(_role("work")(read(ctx), reload=lambda: read(ctx)))


@app.command()
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
    said = _role("train")(settings)
    results.show(settings.run, said, {"drafter": settings.trainer.drafter})


@app.command()
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
    raise typer.Exit(_role("trainer")(read(ctx)))


@app.command()
def evaluate(
    ctx: typer.Context,
    *,
    drafter: Drafter = None,
    target: Target = None,
    k: Annotated[Int, typer.Option(metavar="N", help="Tokens drafted per step.")] = None,
    prompts: Annotated[Int, typer.Option(metavar="N", help="Held-out prompts.")] = None,
    progress: Progress = None,
    config: Config = None,
    run: Run = None,
    storage: Storage = None,
    assign: Set = None,
) -> None:
    """Measure a drafter on held-out prompts."""
    settings = read(ctx)
    results.show(settings.run, "evaluated", _role("evaluate")(settings, progress=_shows_bars(progress)))


@app.command()
def export(
    ctx: typer.Context,
    *,
    drafter: Drafter = None,
    target: Target = None,
    formats: Annotated[
        list[str] | None, typer.Option("--format", metavar="NAME", help="vllm or sglang. Repeatable. Unset: all.")
    ] = None,
    config: Config = None,
    run: Run = None,
    storage: Storage = None,
    assign: Set = None,
) -> None:
    """Write the folders that engines serve."""
    settings = read(ctx)
    results.show(settings.run, "exported", _role("export")(settings, formats or []))


@app.command()
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
    raise typer.Exit(_role("status")(read(ctx), watch=watch, as_json=as_json, repair=repair))


@app.command()
def up(
    ctx: typer.Context,
    *,
    servers: Servers = None,
    concurrency: Concurrency = None,
    model: Model = None,
    target: Target = None,
    config: Config = None,
    run: Run = None,
    storage: Storage = None,
    assign: Set = None,
) -> None:
    """Start Redis, a worker, a trainer and Flower.

    All on this machine, for inference servers that already run.
    """
    raise typer.Exit(_role("up")(read(ctx)))


@app.command()
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
    raise typer.Exit(_role("flower")(read(ctx)))


@app.command("settings")
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


def main() -> None:
    app(prog_name="draftfleet")


def _role(verb: str) -> Callable[..., Any]:
    module, _, function = ROLES[verb].partition(":")
    try:
        return getattr(importlib.import_module(module), function)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] in ("draftfleet", "producer", "workers", "trainer"):
            raise
        raise DraftfleetError(
            f"`draftfleet {verb}` needs the package {error.name}, which is not installed here: "
            "install draftfleet with its extra, `pip install '.[trainer]'`."
        ) from error


def _shows_bars(progress: bool | None) -> bool:
    return sys.stderr.isatty() if progress is None else progress
