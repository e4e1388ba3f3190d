"""How the drafters of a run are getting on."""

from __future__ import annotations

from typing import Any

from draftfleet import trainings
from draftfleet.drafters import names, read
from draftfleet.runs import Run

NOT_BEGUN: dict[str, Any] = {
    "step": 0,
    "loss": None,
    "tokens": 0,
    "tokens_per_s": 0.0,
    "rows_admitted": 0,
    "finished": False,
    "acceptance_length": None,
}


def drafters(run: Run) -> dict[str, Any]:
    """The live progress of each drafter of the run; step 0 for one that was asked for and has not begun.

    `best` is what best.json says, None before a checkpoint was measured; `state` what the progress alone tells.
    """
    found: dict[str, Any] = {}
    for name in names(run):
        if (pinned := read(run, name, "drafter-settings.json")) is not None:
            progress = read(run, name, "progress.json") or {"max_steps": pinned["trainer"]["max_steps"]}
            found[name] = NOT_BEGUN | progress
            found[name] |= {
                "algorithm": pinned["trainer"].get("algorithm", "eagle3"),  # an older version had no other
                "best": read(run, name, "best.json"),
                "state": trainings.by_progress(found[name]),
                "trainer": None,
            }
    return found
