"""What is looked at before anything is asked: prompts, folder, the run that may be there, servers."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from draftfleet.accounting import Accountant
from draftfleet.errors import DraftfleetError, RunMissing, SettingsError
from draftfleet.generate import readable
from draftfleet.reconcile import model_of
from draftfleet.roles import role
from draftfleet.runs import Run
from draftfleet.settings import Settings
from draftfleet.storage import FileStorage, open_storage
from draftfleet.up import hold
from draftfleet.up.stack import with_knobs

GB = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """`jsonl`: where the answers are written at the end. `wait_s`: how long servers may load.

    `adds`: prompts that the folder does not hold yet are taken in. `retries`: what failed before is asked again.
    """

    jsonl: Path | None = None
    wait_s: float = 0.0
    adds: bool = False
    retries: bool = False
    progress: bool = False


class WrongInput(DraftfleetError):
    """Nothing was asked: the command, its files or its servers have to change."""

    exit_code = 2


def checked(settings: Settings, wanted: Wanted) -> tuple[Settings, bool]:
    """The settings with the model filled in, and whether there is anything to ask.

    Raises SettingsError, DataError, RunConflict, RunBusy, StorageError or ServerError.
    """
    folder = Path(settings.queue.embedded_dir).absolute()
    if hold.find(folder)[1]:
        raise hold.busy(folder)
    if not settings.producer.data:
        raise SettingsError("no prompts are named: --prompts FILE.")
    role("prompts")(settings, 1)
    _check_folder(settings)
    run = _begun(settings)
    if wanted.jsonl is not None:
        _check_jsonl(settings, wanted.jsonl, is_new=run is None)
    if run is not None:
        settings = _with_model(settings, settings.target.model or model_of(run))
        role("refuse other")(settings, adds=wanted.adds)
        account = Accountant(run).account()
        has_all = account.is_complete and not wanted.adds and not (wanted.retries and account.failed)
        if has_all:
            return settings, False
    found = role("served")(settings, wait_s=wanted.wait_s, tell=_tell)
    for line in found.warnings:
        _tell(line)
    return _with_model(settings, found.model), True


def _begun(settings: Settings) -> Run | None:
    storage = open_storage(settings.storage)
    try:
        return Run.open(storage, settings.run)
    except RunMissing:
        if storage.exists(f"{settings.run}/run.json"):  # it is being deleted
            raise
        return None


def _check_folder(settings: Settings) -> None:
    """Made if it is not there. A store is probed when the prompts are put there."""
    storage = open_storage(settings.storage)
    if not isinstance(storage, FileStorage):
        return
    try:
        storage.root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingsError(f"--out {storage.root} cannot be made: {error.strerror}. Name a folder of yours.") from None
    if not os.access(storage.root, os.W_OK | os.X_OK):
        raise SettingsError(f"--out {storage.root} cannot be written by you: name a folder of yours.")
    free_bytes, least_gb = storage.free_bytes(), settings.storage.min_free_gb
    if free_bytes is not None and (free_gb := free_bytes / GB) < least_gb:
        raise SettingsError(
            f"--out {storage.root} has {free_gb:.2f} GB left, and nothing is asked with less than storage.min_free_gb "
            f"= {least_gb:g}: make room, name a folder on another disk, or lower it."
        )


def _check_jsonl(settings: Settings, file: Path, *, is_new: bool) -> None:
    data = settings.producer.data
    if any(file.absolute() == Path(one).expanduser().absolute() for one in ([data] if isinstance(data, str) else data)):
        raise SettingsError(f"--jsonl {file} is the file of the prompts: name another one.")
    if is_new and file.exists():
        raise SettingsError(f"--jsonl {file} is there already, and not of this run: name another one, or remove it.")
    readable.check(file)


def _with_model(settings: Settings, model: str) -> Settings:
    return with_knobs(settings, "target", model=model)


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
