"""The verbs that get samples: prompts into the queue, answers out of the servers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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


def generate(
    ctx: typer.Context,
    *,
    data: Annotated[
        list[str] | None,
        typer.Option("--prompts", metavar="FILE", help="Or a folder, or a data set on the hub. Repeatable."),
    ] = None,
    servers: Annotated[
        list[str] | None,
        typer.Option(metavar="URL[,URL...]", help="Also a range: http://localhost:8000-8007. Repeatable."),
    ] = None,
    out: Annotated[Text, typer.Option(metavar="DIR", help="For the answers, and for going on after a stop.")] = None,
    jsonl: Annotated[
        Path | None, typer.Option(metavar="FILE", help="At the end, the answers as JSON Lines to read.")
    ] = None,
    max_tokens: Annotated[Int, typer.Option(metavar="N", help="Longest completion, reasoning included.")] = None,
    concurrency: Concurrency = None,
    model: Annotated[Text, typer.Option(metavar="NAME", help="Unset: the one that the servers serve.")] = None,
    target: Annotated[
        Text, typer.Option(metavar="PATH", help="Its tokenizer, needed where servers tell no token ids.")
    ] = None,
    temperature: Annotated[Float, typer.Option(metavar="X", help="Unset: the server's default.")] = None,
    thinking: Annotated[Bool, typer.Option(help="Reasoning on or off. Unset: the template decides.")] = None,
    samples: Annotated[Int, typer.Option(metavar="N", help="Of each prompt.")] = None,
    wait_servers: Annotated[
        Text, typer.Option(metavar="TIME", help="How long servers may load: 90s, 30m, 2h. Unset: not at all.")
    ] = None,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Ask again what failed before.")] = False,
    add_prompts: Annotated[
        bool, typer.Option("--add-prompts", help="Take in prompts that DIR does not hold yet.")
    ] = False,
    progress: Progress = None,
    config: Config = None,
    run: Run = None,
    assign: Set = None,
) -> None:
    """Answer a file of prompts: the whole fleet as one command.

    Started again after a stop or a crash, the same command goes on; nothing is asked twice.
    Exit code 0: every prompt has an answer. 1: some failed. 2: nothing was asked, something has to be corrected.
    130: Ctrl-C, after what was in flight had ended.
    """
    from draftfleet.errors import SettingsError  # noqa: PLC0415
    from draftfleet.generate.checks import Wanted  # noqa: PLC0415  brings pyarrow, which the help can do without
    from draftfleet.letters import span_s  # noqa: PLC0415

    if out is None:
        raise SettingsError("--out is not given: name a folder for the answers, as in --out answers.")
    folder = out if "://" in out else str(Path(out).expanduser().absolute())
    implied: dict[str, Any] = {"storage.url": folder, "queue.url": None, "queue.url_file": None}
    if "s3://" not in folder:
        implied["queue.embedded_dir"] = f"{folder.removeprefix('file://')}/.draftfleet"
    settings = read(ctx, implied)
    wanted = Wanted(
        jsonl=jsonl,
        wait_s=0 if wait_servers is None else span_s(wait_servers, "--wait-servers"),
        adds=add_prompts,
        retries=retry_failed,
        progress=shows_bars(progress),
    )
    raise typer.Exit(role("generate")(settings, wanted))


def up(
    ctx: typer.Context,
    *,
    detach: Annotated[bool, typer.Option("--detach", help="Return once all parts answer; they go on.")] = False,
    shows_status: Annotated[bool, typer.Option("--status", help="Say what is up here, and end.")] = False,
    in_background: Annotated[bool, typer.Option("--in-background", hidden=True)] = False,
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
    settings = read(ctx)
    if shows_status:
        if (said := role("up status")(settings)) is None:
            raise typer.Exit(1)
        results.show(None, "up", said)
    elif detach:
        raise typer.Exit(role("up detached")(settings))
    else:
        raise typer.Exit(role("up")(settings, in_background=in_background))


def down(
    ctx: typer.Context,
    *,
    now: Annotated[
        bool, typer.Option("--now", help="Put aside what is in flight instead of waiting for its answers.")
    ] = False,
    config: Config = None,
    assign: Set = None,
) -> None:
    """Drain and stop what `up` started here.

    It waits until nothing of it runs any more.
    """
    results.show(None, "down", role("down")(read(ctx), now=now))


def logs(
    ctx: typer.Context,
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="up, work, trainer, flower or valkey. Unset: all.")
    ] = None,
    *,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what is written, until Ctrl-C.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", metavar="N", min=0, help="The last so many.")] = 50,
    config: Config = None,
    assign: Set = None,
) -> None:
    """Show what the parts of `up` say, by time.

    Each line has the name of its part in front.
    """
    raise typer.Exit(role("logs")(read(ctx), name, follow=follow, count=lines))
