"""The verb that plays inference servers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from draftfleet.flags import Float, Int, Text


def fake_server(
    *,
    servers: Annotated[int, typer.Option(metavar="N", help="So many, on consecutive ports.", min=1)] = 1,
    host: Annotated[str, typer.Option(metavar="HOST", help="Where they listen.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(metavar="N", help="Of the first one. 0: any free ports.")] = 0,
    shape: Annotated[
        Text, typer.Option(metavar="NAME", help="vllm, sglang, llamacpp, transformers or openai. Unset: vllm.")
    ] = None,
    model: Annotated[Text, typer.Option(metavar="NAME", help="That they serve. Unset: target.")] = None,
    tokens: Annotated[Int, typer.Option(metavar="N", help="Mean length of an answer.")] = None,
    spread: Annotated[Float, typer.Option(metavar="X", help="Of the lengths: sigma of a log-normal.")] = None,
    most_tokens: Annotated[Int, typer.Option(metavar="N", help="Longest answer.")] = None,
    slots: Annotated[Int, typer.Option(metavar="N", help="Requests at work at once; more of them queue.")] = None,
    kv_tokens: Annotated[Int, typer.Option(metavar="N", help="Tokens that fit into the KV cache.")] = None,
    seconds_per_token: Annotated[Float, typer.Option(metavar="S", help="Of a request alone.")] = None,
    half_speed_at: Annotated[Float, typer.Option(metavar="N", help="So many others halve a request's speed.")] = None,
    time_scale: Annotated[Float, typer.Option(metavar="X", help="All times are divided by this.")] = None,
    config: Annotated[Path | None, typer.Option(metavar="FILE", help="All of these and more, as TOML.")] = None,
    assign: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Any setting: server.3.speed=0.5. Repeatable."),
    ] = None,
    json: Annotated[Text, typer.Option(metavar="OBJECT", help="The same as --config, as JSON.")] = None,
    parent: Annotated[
        Int, typer.Option(hidden=True, help="Process id: end when that process, our parent, ends.")
    ] = None,
) -> None:
    """Play inference servers, faults included, for tests.

    Prints {"urls": [...]} once they listen, and stays until it is stopped.
    """
    flags = {
        "shape": shape,
        "model": model,
        "tokens": tokens,
        "spread": spread,
        "most_tokens": most_tokens,
        "slots": slots,
        "kv_tokens": kv_tokens,
        "seconds_per_token": seconds_per_token,
        "half_speed_at": half_speed_at,
        "time_scale": time_scale,
    }
    from draftfleet.testing import command  # noqa: PLC0415  brings pydantic and aiohttp, which the help can do without

    given = {name: value for name, value in flags.items() if value is not None}
    settings = command.read(given, config=config, text=json, assigned=assign or [])
    command.serve(settings, servers=servers, host=host, port=port, parent=parent)
