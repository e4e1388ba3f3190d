"""A data set of the `datasets` library, as a stream: a name on the hub, or a folder that `save_to_disk` wrote."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pyarrow as pa

from draftfleet.errors import DataError
from draftfleet.logs import event
from producer.shapes import Row
from producer.sources.source import Line

log = logging.getLogger(__name__)

ANSWER_S = 10.0
"""How long the hub may take to say which commit a data set is at."""


class DataSet:
    """A Source: a stream of `datasets`."""

    def __init__(
        self, name: str, stream: Any, size: int | None, provenance: dict[str, Any], digest: str | None
    ) -> None:
        self.name = name
        self.size = size
        self.position = 0
        self.columns: list[str] | None = stream.column_names
        self.provenance = {"kind": "datasets", "rows": size, **provenance}
        self.digest = digest
        # An image is only looked at to be refused: its bytes need not be made a picture.
        self._stream = stream.decode(False) if stream.features is not None else stream

    def is_unchanged(self) -> bool:
        return self.digest is not None

    def lines(self, columns: set[str]) -> Iterator[Line]:
        present = [name for name in self.columns or [] if name in columns]
        stream = self._stream.select_columns(present) if present else self._stream
        try:
            for row in stream:
                self.position += 1
                yield Line(self.position, cast(Row, row))
        except _faults() as error:
            raise DataError(
                f"data set {self.name} cannot be read after row {self.position}: {error}. What came before it is "
                "queued; produce again once it can be read: only what is new is added."
            ) from error


def open_hub(name: str, split: str, subset: str | None, revision: str | None, hint: str = "") -> DataSet:
    """A data set on the hub, at the commit that `revision`, or its newest, is now: what is read does not change.

    Where the hub is out of reach, a copy in this machine's cache will do. `hint` names files that may have been meant.
    """
    from datasets import load_dataset  # noqa: PLC0415  # takes seconds, so only who needs it pays

    repository, _, config = name.partition(":")
    asked = {"split": split, "subset": subset or config or None, "revision": revision}
    try:
        place, commit = _resolved(repository, revision)
        at = {"revision": commit} if place == repository else {}
        stream = cast(Any, load_dataset)(place, asked["subset"], split=split, streaming=True, **at)
    except _faults() as error:
        raise DataError(
            f"producer.data = {name}, split {split}: neither a file{hint} nor a data set that could be opened: {error} "
            "Name files, a folder, or a data set on the hub; producer.split and producer.subset say which part of it."
        ) from error
    known = (stream.info.splits or {}).get(split)
    size = known.num_examples if known is not None and known.num_examples else None
    provenance = {"name": repository, **asked, "commit": commit, "version": str(stream.info.version)}
    return DataSet(name, stream, size, provenance, f"{repository} {asked['subset']} {split} {commit}")


def open_saved(path: Path, split: str | None) -> DataSet:
    """A folder that `save_to_disk` wrote."""
    from datasets import DatasetDict, load_from_disk  # noqa: PLC0415  # as above

    try:
        found = load_from_disk(str(path))
    except _faults() as error:
        raise DataError(f"producer.data = {path} cannot be opened as a saved data set: {error}.") from error
    if isinstance(found, DatasetDict):
        wanted = split or "train"
        if wanted not in found:
            there = ", ".join(map(str, found))
            raise DataError(f"{path} has no split {wanted}; there are {there}. Name one with producer.split.")
        found = found[wanted]
    stream, rows = found.to_iterable_dataset(), found.num_rows
    return DataSet(str(path), stream, rows, {"path": str(path), "split": split}, None)


def _resolved(repository: str, revision: str | None) -> tuple[str, str]:
    """Where the data set is read, and at which commit. Raises OSError, or what `_faults` names, in the user's words."""
    from huggingface_hub import HfApi, constants, snapshot_download  # noqa: PLC0415  # as above
    from huggingface_hub import errors as hub  # noqa: PLC0415

    page = f"{constants.ENDPOINT}/datasets/{repository}"
    try:
        if constants.HF_HUB_OFFLINE:
            raise hub.OfflineModeIsEnabled("HF_HUB_OFFLINE is set")
        commit = HfApi().dataset_info(repository, revision=revision, timeout=ANSWER_S).sha
        return repository, str(commit)
    except hub.GatedRepoError:
        raise OSError(f"it is gated. Accept its terms on {page}, and set HF_TOKEN.") from None
    except hub.RevisionNotFoundError:
        raise OSError(f"it has no revision {revision}: {page}/commits lists them.") from None
    except hub.RepositoryNotFoundError:
        raise OSError(
            f"the hub has none of this name that you may see; for a private one set HF_TOKEN ({page})."
        ) from None
    except _faults() as error:
        try:
            folder = snapshot_download(repository, repo_type="dataset", revision=revision, local_files_only=True)
        except (hub.LocalEntryNotFoundError, OSError):
            raise OSError(
                f"the hub cannot be reached ({error}), and no copy is in {constants.HF_HUB_CACHE}. Where there is a "
                f"network: `hf download {repository} --repo-type dataset --local-dir FOLDER`; then name its files or "
                "folder."
            ) from None
        log.warning(event("hub out of reach, its cached copy is read", data=repository, folder=folder, error=error))
        return folder, os.path.basename(folder)


def _faults() -> tuple[type[Exception], ...]:
    from datasets.exceptions import DatasetsError  # noqa: PLC0415  # as above
    from huggingface_hub.errors import HTTPError  # noqa: PLC0415  # pyright: ignore[reportPrivateImportUsage]

    return (DatasetsError, HTTPError, pa.ArrowException, OSError, ValueError, RuntimeError, KeyError)
