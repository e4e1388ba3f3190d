"""The verb that measures a drafter in serving engines."""

from __future__ import annotations

from typing import Annotated

import typer

from draftfleet.cli.role import role, shows_bars
from draftfleet.flags import Config, Drafter, Int, Model, Progress, Run, Set, Storage, Target, Text, read


def bench(
    ctx: typer.Context,
    *,
    with_url: Annotated[str, typer.Option("--with", metavar="URL", help="The server with the drafter.")],
    without_url: Annotated[
        Text, typer.Option("--without", metavar="URL", help="The same target without it. Unset: no comparison.")
    ] = None,
    levels: Annotated[
        str, typer.Option("--concurrency", metavar="N[,N...]", help="Requests at once, one after the other.")
    ] = "1,8,32",
    file: Annotated[
        Text, typer.Option("--prompts", metavar="FILE", help="What is asked. Unset: the run's held-out prompts.")
    ] = None,
    most: Annotated[
        int, typer.Option("--limit", metavar="N", help="Prompts; twice the concurrency if that is more.")
    ] = 32,
    longest: Annotated[
        Int, typer.Option("--max-tokens", metavar="N", help="Of an answer. Unset: evaluation.max_tokens.")
    ] = None,
    repeat: Annotated[int, typer.Option(metavar="N", help="Times that each is measured; the median counts.")] = 3,
    heat: Annotated[
        float, typer.Option("--temperature", metavar="T", help="At 0 the answers are compared, too.")
    ] = 0.0,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
    drafter: Drafter = None,
    model: Model = None,
    target: Target = None,
    progress: Progress = None,
    config: Config = None,
    run: Run = None,
    storage: Storage = None,
    assign: Set = None,
) -> None:
    """Measure a drafter in running vLLM or SGLang servers.

    Tokens per second with it and without, and how many of its tokens are accepted, by the server's own counters.
    """
    settings = read(ctx)
    from draftfleet.benching import Options  # noqa: PLC0415  what the help can do without
    from draftfleet.errors import SettingsError  # noqa: PLC0415

    try:
        concurrency = [int(one) for one in levels.split(",") if one.strip()]
    except ValueError:
        raise SettingsError(f"--concurrency {levels}: numbers with commas between them, as in 1,8,32.") from None
    options = Options(
        with_url=with_url,
        without_url=without_url,
        concurrency=concurrency,
        file=file,
        limit=most,
        max_tokens=longest,
        repeat=repeat,
        temperature=heat,
    )
    raise typer.Exit(
        role("bench")(settings, options, first_prompts=role("prompts"), as_json=as_json, progress=shows_bars(progress))
    )
