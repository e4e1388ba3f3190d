"""From a verb to the function that does it, imported on use: neither the help nor `import draftfleet` needs any."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from draftfleet.errors import DraftfleetError

ROLES = {
    "produce": "producer.produce:produce",
    "import-data": "producer.import_data.importing:import_data",
    "presets": "producer.presets:show",
    "work": "workers.app:work",
    "doctor": "workers.doctor:doctor",
    "train": "trainer.tasks:enqueue",
    "trainer": "trainer.app:serve",
    "capture-command": "trainer.targets.vllm.command:command",
    "evaluate": "trainer.evaluate:evaluate",
    "export": "trainer.export.publish:publish",
    "bench": "workers.bench:bench",
    "export-data": "draftfleet.export_data.export:export",
    "join": "workers.app:work",
    "status": "draftfleet.status.showing:show",
    "pause": "draftfleet.orders:pause",
    "resume": "draftfleet.orders:resume",
    "cancel": "draftfleet.orders:cancel",
    "drain": "draftfleet.drain:drain",
    "runs list": "draftfleet.listing:show",
    "runs priority": "draftfleet.orders:set_priority",
    "runs budget": "draftfleet.orders:set_budget",
    "runs delete": "draftfleet.deletion:delete",
    "continue": "draftfleet.continuing:go_on",
    "dead list": "draftfleet.dead:show_list",
    "dead show": "draftfleet.dead:show_one",
    "dead revive": "draftfleet.dead:revive",
    "dead export": "draftfleet.dead:export",
    "verify": "draftfleet.verify:show",
    "generate": "draftfleet.generate.run:generate",
    "up": "draftfleet.up.foreground:up",
    "down": "draftfleet.up.down:down",
    "logs": "draftfleet.up.lines:show",
    "report": "draftfleet.report:report",
    "flower": "draftfleet.flower:serve",
}
"""From verb to module and function. A verb of two words belongs to a group: `draftfleet runs list`."""

PARTS = {
    "dry run": "producer.preview.dry_run:show",
    "dry run found": "producer.preview.dry_run:dry_run",
    "findings": "workers.doctor:findings",
    "target doctor": "workers.doctor:doctor_of_target",
    "target look": "trainer.examine:look",
    "bench found": "workers.bench:found",
    "up detached": "draftfleet.up.detaching:detach",
    "up status": "draftfleet.up.down:standing",
    "refuse other": "producer.begun:refuse_other",
    "served": "workers.serving:served",
    "prompts": "producer.preview:first_prompts",
    "tensorboard curve": "trainer.curve:from_tensorboard",
    "every checkpoint": "trainer.acceptance:measure_all",
    "preset names": "producer.presets:names",
    "pins": "producer.produce:pins",
}
"""What a role has for another verb than its own: no verbs."""


def role(verb: str) -> Callable[..., Any]:
    module, _, function = (ROLES | PARTS)[verb].partition(":")
    try:
        return getattr(importlib.import_module(module), function)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] in ("draftfleet", "producer", "workers", "trainer"):
            raise
        raise DraftfleetError(
            f"`draftfleet {verb}` needs the package {error.name}, which is not installed here: "
            "install draftfleet with its extra, `pip install '.[trainer]'`."
        ) from error
