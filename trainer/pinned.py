"""drafter-settings.json: what a drafter is trained with. Pinned by the first `draftfleet train`."""

from __future__ import annotations

import json
from typing import Any

from pydantic import ValidationError

from draftfleet.errors import CorruptFile, RunConflict, RunMissing
from draftfleet.runs import Run
from draftfleet.settings import Settings, Target, Trainer

FREE = {
    "trainer.checkpoint_steps",
    "trainer.device",
    "trainer.keep_checkpoints",
    "trainer.log_steps",
    "trainer.poll_s",
    "trainer.processes",
    "target.path",
    "target.context_tokens",
}
"""What may change from one start to the next: it changes how fast the same drafter is trained, or where."""


def pin(run: Run, settings: Settings) -> None:
    """Write down what the drafter is trained with. If it is there, it stands: only knobs that were given are compared.

    Raises RunConflict, naming each difference, if the drafter was begun with other settings than those given.
    """
    path = _path(run, settings.trainer.drafter)
    parts = {"trainer": settings.trainer, "target": settings.target}
    if run.storage.put_if_absent(path, _text({name: part.model_dump() for name, part in parts.items()})):
        return
    trainer, target = _read(run, settings.trainer.drafter)
    had = {"trainer": trainer.model_dump(), "target": target.model_dump()}
    given = {name: part.model_dump(include=part.model_fields_set) for name, part in parts.items()}
    differences = [
        f"  {section}.{key}: it has {had[section][key]!r}, now {value!r}"
        for section, values in given.items()
        for key, value in values.items()
        if had[section][key] != value and f"{section}.{key}" not in FREE
    ]
    if differences:
        raise RunConflict(
            f"drafter {settings.trainer.drafter} of run {run.name} was begun with other settings:\n"
            + "\n".join(differences)
            + "\nGo on with its settings, train another one under a new trainer.drafter, or delete "
            f"{run.drafter_dir(settings.trainer.drafter)} to begin it anew."
        )
    now = {section: had[section] | given[section] for section in had}
    if had != now:
        run.storage.put(path, _text(now))


def _text(sections: dict[str, dict[str, Any]]) -> bytes:
    return (json.dumps(sections, indent=2) + "\n").encode()


def with_pinned(run: Run, drafter: str, settings: Settings) -> Settings:
    """The settings to train this drafter with: pinned ones, on this node's storage, queue, target folder and device.

    Raises RunMissing if nothing was pinned.
    """
    trainer, target = _read(run, drafter)
    trainer = trainer.model_copy(update={"device": settings.trainer.device})
    if settings.target.path:
        target = target.model_copy(update={"path": settings.target.path})
    return settings.model_copy(update={"run": run.name, "trainer": trainer, "target": target})


def _read(run: Run, drafter: str) -> tuple[Trainer, Target]:
    path = _path(run, drafter)
    try:
        stored: dict[str, Any] = json.loads(run.storage.read(path))
        return Trainer.model_validate(stored["trainer"]), Target.model_validate(stored["target"])
    except FileNotFoundError:
        raise RunMissing(
            f"drafter {drafter} of run {run.name} is not in {run.storage.url}: begin it with `draftfleet train`, "
            "or point storage.url at the folder that holds it."
        ) from None
    except (ValueError, KeyError, TypeError, ValidationError) as error:
        raise CorruptFile(f"{run.storage.url}/{path} cannot be read: {error}. Restore it from a copy.") from None


def _path(run: Run, drafter: str) -> str:
    return f"{run.name}/drafters/{drafter}/drafter-settings.json"
