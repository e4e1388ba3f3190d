"""drafter-settings.json: what a drafter is trained with. Pinned by the first `draftfleet train`."""

from __future__ import annotations

import json
from typing import Any, cast

from pydantic import ValidationError

from draftfleet.errors import CorruptFile, RunConflict, RunMissing
from draftfleet.runs import Run
from draftfleet.settings import Section, Settings, Target, Trainer
from trainer.progress import Progress

FREE = {
    "trainer.activation_checkpointing",
    "trainer.attention",
    "trainer.checkpoint_steps",
    "trainer.compile",
    "trainer.device",
    "trainer.device_map",
    "trainer.evaluate_steps",
    "trainer.keep_checkpoints",
    "trainer.log_steps",
    "trainer.poll_s",
    "trainer.prefetch",
    "trainer.processes",
    "trainer.target",
    "trainer.target_gpu_gb",
    "trainer.trackers",
    "target.path",
    "target.context_tokens",
}
"""What may change from one start to the next: it changes how fast the same drafter is trained, or where."""


def pin(run: Run, settings: Settings) -> None:
    """Write down what the drafter is trained with. If it is there, it stands: only knobs that were given are compared.

    Of one that failed before its first checkpoint there is nothing to keep: given knobs replace its own. Raises
    RunConflict, naming each difference, if the drafter was begun with other settings than those given.
    """
    drafter = settings.trainer.drafter
    path = _path(run, drafter)
    parts = _parts(settings)
    if run.storage.put_if_absent(path, _text({name: part.model_dump() for name, part in parts.items()})):
        return
    had = {name: part.model_dump() for name, part in _read(run, drafter).items()}
    given = {name: part.model_dump(include=part.model_fields_set) for name, part in parts.items()}
    differences = [
        f"  {section}.{key}: it has {had[section][key]!r}, now {value!r}"
        for section, values in given.items()
        if section in had  # another algorithm's is told by trainer.algorithm
        for key, value in values.items()
        if had[section][key] != value and f"{section}.{key}" not in FREE
    ]
    if differences and not _is_nothing_yet(run, drafter):
        raise RunConflict(
            f"drafter {drafter} of run {run.name} was begun with other settings:\n"
            + "\n".join(differences)
            + "\nGo on with its settings, train another one under a new trainer.drafter, or delete "
            f"{run.drafter_dir(drafter)} to begin it anew."
        )
    now = {section: values | given.get(section, {}) for section, values in had.items()}
    if (algorithm := now["trainer"]["algorithm"]) not in now:
        now = {"trainer": now["trainer"], "target": now["target"], algorithm: parts[algorithm].model_dump()}
    if had != now:
        run.storage.put(path, _text(now))


def _is_nothing_yet(run: Run, drafter: str) -> bool:
    """Whether its training ended with an error before there was a checkpoint, so that no process is at work on it."""
    progress = Progress.read(run, drafter)
    checkpoints = run.storage.folders(f"{run.name}/drafters/{drafter}/checkpoints")
    return progress is not None and progress.error is not None and not any(checkpoints)


def _text(sections: dict[str, dict[str, Any]]) -> bytes:
    return (json.dumps(sections, indent=2) + "\n").encode()


def with_pinned(run: Run, drafter: str, settings: Settings) -> Settings:
    """The settings to train this drafter with: pinned ones, on this node's storage, queue, target folder and device.

    Raises RunMissing if nothing was pinned.
    """
    pinned = _read(run, drafter)
    pinned["trainer"] = pinned["trainer"].model_copy(update={"device": settings.trainer.device})
    if settings.target.path:
        pinned["target"] = pinned["target"].model_copy(update={"path": settings.target.path})
    return settings.model_copy(update={"run": run.name, **pinned})


def _parts(settings: Settings) -> dict[str, Section]:
    """The sections that are pinned: those of the algorithm that is trained, not of the others."""
    names = ["trainer", "target", settings.trainer.algorithm]
    return {name: getattr(settings, name) for name in names}


def _read(run: Run, drafter: str) -> dict[str, Section]:
    path = _path(run, drafter)
    try:
        stored: dict[str, Any] = json.loads(run.storage.read(path))
        trainer, target = Trainer.model_validate(stored["trainer"]), Target.model_validate(stored["target"])
        name = trainer.algorithm
        kind = cast(type[Section], Settings.model_fields[name].annotation)
        # An older version pinned no section of the algorithm: it knew no such knobs.
        return {"trainer": trainer, "target": target, name: kind.model_validate(stored.get(name, {}))}
    except FileNotFoundError:
        raise RunMissing(
            f"drafter {drafter} of run {run.name} is not in {run.storage.url}: begin it with `draftfleet train`, "
            "or point storage.url at the folder that holds it."
        ) from None
    except (ValueError, KeyError, TypeError, ValidationError) as error:
        raise CorruptFile(f"{run.storage.url}/{path} cannot be read: {error}. Restore it from a copy.") from None


def _path(run: Run, drafter: str) -> str:
    return f"{run.name}/drafters/{drafter}/drafter-settings.json"
