"""The verbs that get samples: prompts into the queue, answers out of the servers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from draftfleet import completing, results
from draftfleet.cli.role import role, shows_bars
from draftfleet.flags import (
    Bool,
    Concurrency,
    Config,
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
    begin_log,
    read,
    said,
)

if TYPE_CHECKING:
    from draftfleet.settings import Settings


def produce(
    ctx: typer.Context,
    data: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="DATA",
            help="Files, a folder, a data set on the hub, or preset:NAME.",
            autocompletion=completing.data,
        ),
    ] = None,
    *,
    model: Model = None,
    target: Target = None,
    split: Annotated[Text, typer.Option(metavar="NAME", help="Of the hub or a folder. Unset: train.")] = None,
    subset: Annotated[Text, typer.Option(metavar="NAME", help="Configuration on the hub.")] = None,
    revision: Annotated[Text, typer.Option(metavar="REVISION", help="Of the hub. Unset: the newest.")] = None,
    column: Annotated[
        Text, typer.Option(metavar="NAME", help="With the conversations. Unset: found by itself.")
    ] = None,
    split_column: Annotated[Text, typer.Option(metavar="NAME", help="That says train or heldout.")] = None,
    heldout: Annotated[Float, typer.Option(metavar="SHARE", help="Held out by hash.")] = None,
    batch_size: Annotated[Int, typer.Option(metavar="N", help="Rows per batch.")] = None,
    limit: Annotated[Int, typer.Option(metavar="N", help="Read at most N lines.")] = None,
    sample: Annotated[Int, typer.Option(metavar="N", help="Draw N prompts of those read.")] = None,
    seed: Annotated[Int, typer.Option(metavar="N", help="Which ones --sample draws.")] = None,
    language: Annotated[
        list[str] | None, typer.Option(metavar="NAME[,NAME...]", help="Keep rows in these languages. Repeatable.")
    ] = None,
    strict: Annotated[Bool, typer.Option("--strict", help="Stop at the first malformed line.")] = None,
    priority: Annotated[Text, typer.Option(metavar="NAME", help="high, normal or low, among runs.")] = None,
    token_budget: Annotated[Int, typer.Option(metavar="N", help="Tokens after which the run is paused.")] = None,
    max_tokens: Annotated[Int, typer.Option(metavar="N", help="Longest completion, reasoning included.")] = None,
    temperature: Annotated[Float, typer.Option(metavar="X", help="Unset: the server's default.")] = None,
    thinking: Annotated[Bool, typer.Option(help="Reasoning on or off. Unset: the template decides.")] = None,
    samples: Annotated[Int, typer.Option(metavar="N", help="Of each prompt.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Write nothing: count, measure and show the prompts, estimate the work.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --dry-run: one JSON line.")] = False,
    show: Annotated[int, typer.Option(metavar="N", min=0, help="With --dry-run: prompts to show.")] = 3,
    measure: Annotated[
        int, typer.Option(metavar="N", min=0, help="With --dry-run: prompts to tokenize, drawn by hash. 0: all.")
    ] = 20_000,
    mean_tokens: Annotated[
        Float, typer.Option(metavar="N", min=1, help="With --dry-run: mean length of an answer.")
    ] = None,
    tokens_per_second: Annotated[
        Float, typer.Option(metavar="X", min=0.1, help="With --dry-run: what one server makes.")
    ] = None,
    num_servers: Annotated[
        int, typer.Option(metavar="N", min=0, help="With --dry-run: how many. 0: as worker.servers.")
    ] = 0,
    progress: Progress = None,
    config: Config = None,
    run: Run = None,
    storage: Storage = None,
    assign: Set = None,
) -> None:
    """Put the prompts of a data set into the queue."""
    settings = read(ctx)
    if dry_run:
        raise typer.Exit(
            role("dry run")(
                settings,
                as_json=as_json,
                progress=shows_bars(progress),
                num_shown=show,
                num_measured=measure,
                mean_tokens=mean_tokens,
                tokens_per_s=tokens_per_second,
                num_servers=num_servers,
            )
        )
    results.show(settings.run, "produced", role("produce")(settings, progress=shows_bars(progress)))


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
    raise typer.Exit(role("work")(read(ctx), reload=lambda: read(ctx)))


def join(
    ctx: typer.Context,
    storage: Annotated[Text, typer.Argument(metavar="STORAGE_URL", help="A folder or s3://BUCKET/PREFIX.")] = None,
    *,
    run: Run = None,
    servers: Servers = None,
    concurrency: Concurrency = None,
    target: Target = None,
    config: Config = None,
    assign: Set = None,
) -> None:
    """Work with the settings of a run's other nodes.

    Its producer wrote them into the storage; file, environment and flags of this node win over them. Give the secret
    of the queue in the environment.
    """
    from draftfleet import fleet  # noqa: PLC0415  brings pydantic and pyarrow, which the help can do without

    flags = said(ctx)

    def load() -> Settings:
        settings = fleet.join(config, flags)
        begin_log(ctx, settings)
        return settings

    raise typer.Exit(role("join")(load(), reload=load))


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
    raise typer.Exit(role("up")(read(ctx)))
