"""`draftfleet fake-server`: one or several fake servers in one process, until it is stopped."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from draftfleet.children import die_with_parent
from draftfleet.errors import SettingsError
from draftfleet.logs import event
from draftfleet.settings import assignment
from draftfleet.testing.behaviour import Behaviour
from draftfleet.testing.running import serving

log = logging.getLogger(__name__)


def read(flags: Mapping[str, Any], *, config: Path | None, text: str | None, assigned: Sequence[str]) -> dict[str, Any]:
    """One setting from all the places where it may stand: later ones win. Raises SettingsError on unreadable ones."""
    settings = _file(config) | _object(text) | dict(flags)
    for one in assigned:
        _put(settings, *assignment(one))
    return settings


def serve(settings: Mapping[str, Any], *, servers: int, host: str, port: int, parent: int | None) -> None:
    """Raises SettingsError on settings that are none, and where a port is taken."""
    if parent is not None:
        die_with_parent(parent)
    asyncio.run(_serve(behaviours(settings, servers), host, port))


def behaviours(settings: Mapping[str, Any], servers: int) -> list[Behaviour]:
    """One for each server. `settings["server"]["3"]` is what the fourth has of its own."""
    common = {name: value for name, value in settings.items() if name != "server"}
    own: dict[str, Any] = settings.get("server", {})
    strangers = [number for number in own if number not in map(str, range(servers))]
    if strangers:
        raise SettingsError(f"server.{strangers[0]}: there is no such server; the last of {servers} is {servers - 1}.")
    return [_behaviour(common | own.get(str(number), {})) for number in range(servers)]


def _behaviour(settings: Mapping[str, Any]) -> Behaviour:
    try:
        return Behaviour.model_validate(settings)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        known = ", ".join(Behaviour.model_fields)
        raise SettingsError(f"fake-server: {name} = {first['input']!r}: {first['msg']}. Settings: {known}.") from None


async def _serve(wanted: Sequence[Behaviour], host: str, port: int) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with AsyncExitStack() as stack:
        urls: list[str] = []
        for number, behaviour in enumerate(wanted):
            one = port + number if port else 0
            try:
                urls.append(await stack.enter_async_context(serving(behaviour, host, one)))
            except OSError as error:
                raise SettingsError(f"--port {port}: cannot listen on {host}:{one}: {error.strerror}.") from None
            log.info(event("fake server ready", url=urls[-1], shape=behaviour.shape, model=behaviour.model))
        print(json.dumps({"urls": urls}), flush=True)
        await stop.wait()


def _file(config: Path | None) -> dict[str, Any]:
    if config is None:
        return {}
    try:
        return tomllib.loads(config.read_text())
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise SettingsError(f"--config {config}: {error}") from None


def _object(text: str | None) -> dict[str, Any]:
    try:
        return json.loads(text or "{}")
    except ValueError as error:
        raise SettingsError(f"--json {text}: {error}") from None


def _put(settings: dict[str, Any], path: str, value: Any) -> None:
    *sections, name = path.split(".")
    for section in sections:
        settings = settings.setdefault(section, {})
    settings[name] = value
