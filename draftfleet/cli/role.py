"""From a verb to the role that does it, imported once the flags are read: the help needs none of them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

from draftfleet.errors import DraftfleetError

ROLES = {
    "produce": "producer.produce:produce",
    "work": "workers.app:work",
    "train": "trainer.tasks:enqueue",
    "trainer": "trainer.app:serve",
    "evaluate": "trainer.evaluate:evaluate",
    "export": "trainer.export:export",
    "status": "draftfleet.status:show",
    "verify": "draftfleet.verify:show",
    "up": "draftfleet.up:up",
    "flower": "draftfleet.flower:serve",
}
"""From verb to module and function."""


def role(verb: str) -> Callable[..., Any]:
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


def shows_bars(progress: bool | None) -> bool:
    return sys.stderr.isatty() if progress is None else progress
