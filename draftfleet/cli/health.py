"""The verb that a supervisor asks."""

from __future__ import annotations

from typing import Annotated

import typer

from draftfleet import health as pulses


def health(
    name: Annotated[str, typer.Argument(metavar="ROLE", help="worker or trainer.")],
) -> None:
    """Say whether a worker or a trainer of this machine works.

    Exit code 0 if it does, also while it waits for Redis, a server or the storage. For health checks of containers.
    """
    raise typer.Exit(pulses.show(name))
