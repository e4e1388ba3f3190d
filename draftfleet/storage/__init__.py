"""The shared storage: put only if absent, read, list. A reader never sees half a file.

What the fleet needs of a storage is small and strict: of two processes that put the same path at the same time, one
wins and the other is told so. `probe` proves it before anything is entrusted to it.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol
from urllib.parse import urlsplit

from draftfleet.errors import StorageError, StorageUnsafe
from draftfleet.storage.file import PROBED, FileStorage

if TYPE_CHECKING:
    from draftfleet import settings

__all__ = ["FileStorage", "Storage", "open_storage", "probe"]


class Storage(Protocol):
    """Paths are relative, with `/`; their folders need not exist.

    Writes raise StorageUnwritable when it is full or read-only, reads StorageUnreadable when it does not answer.
    """

    url: str

    def put_if_absent(self, path: str, data: bytes) -> bool:
        """Put the file unless it is there. True if this call put it. Durable on return."""
        ...

    def put_in_order(self, files: Sequence[tuple[str, bytes]]) -> int:
        """Put several files of one folder, one after the other, up to the first that is there. Returns how many.

        What one call puts is never beyond a file that another has put. All are durable on return.
        """
        ...

    def put(self, path: str, data: bytes) -> None:
        """Put or replace the file in one step. Only for control files that one process owns."""
        ...

    def read(self, path: str) -> bytes:
        """Raises FileNotFoundError."""
        ...

    def exists(self, path: str) -> bool: ...

    def list(self, folder: str) -> Iterator[str]:
        """Names of the files in a folder, in no order; nothing if the folder is not there."""
        ...

    def sizes(self, folder: str) -> dict[str, int]:
        """The same names with the files' sizes in bytes."""
        ...

    def folders(self, folder: str = "") -> Iterator[str]:
        """Names of the folders in a folder, at the top if none is named, in no order."""
        ...

    def free_bytes(self) -> int | None:
        """How much more it can hold; None where it does not say."""
        ...

    def delete(self, path: str) -> None:
        """Delete the file if it is there."""
        ...

    def delete_folder(self, path: str) -> None:
        """Delete a folder with all that is in it, if it is there. Stopped midway, it is to be called again."""
        ...

    def rename(self, path: str, new_path: str) -> None:
        """Move a file aside. Raises FileNotFoundError."""
        ...

    def expect_mark(self) -> None:
        """It was probed. From now on, a folder without the mark of a probe is another: StorageUnreadable."""
        ...

    def local(self, path: str) -> Path:
        """The same path for code that needs a real folder. Raises StorageError where the storage has none."""
        ...

    def share(self, path: str) -> None:
        """What was written into this folder through `local` is finished: let all nodes see it as it is there."""
        ...

    def fetch(self, path: str) -> None:
        """Before a folder is read through `local`: bring what other nodes shared of it."""
        ...


def open_storage(where: settings.Storage | str) -> Storage:
    """The storage that the settings name, or that of a URL alone. Raises StorageError on another scheme."""
    url, endpoint_url, local_dir = (
        (where, None, None) if isinstance(where, str) else (where.url, where.endpoint_url, where.local_dir)
    )
    match urlsplit(url).scheme:
        case "" | "file":
            return FileStorage(url.removeprefix("file://"))
        case "s3":
            try:
                from draftfleet.storage.s3 import S3Storage  # noqa: PLC0415  brings boto3, which folders can do without
            except ModuleNotFoundError as error:
                raise StorageError(
                    f"storage.url = {url} needs the package {error.name}, which is not installed here: "
                    "install draftfleet with its extra, `pip install '.[s3]'`."
                ) from None
            return S3Storage(url, endpoint_url=endpoint_url, local_dir=local_dir)
        case scheme:
            raise StorageError(
                f"storage.url = {url}: {scheme}:// is not known; use file://FOLDER, a plain path, or s3://BUCKET/PREFIX."
            )


def probe(storage: Storage) -> None:
    """Prove that it can be written, and that of two puts of one path the second is refused. Leaves its mark there.

    Raises StorageUnwritable, or StorageUnsafe where both puts succeed.
    """
    path = f"{PROBED}/{uuid.uuid4().hex}"
    try:
        first, second = storage.put_if_absent(path, b"first"), storage.put_if_absent(path, b"second")
        if (first, second) != (True, False) or storage.read(path) != b"first":
            raise StorageUnsafe(
                f"{storage.url} let two writers put the same file: two workers could overwrite each other's samples. "
                "Use a POSIX file system with hard links, or a store with conditional writes (docs/storage.md)."
            )
    finally:
        with contextlib.suppress(StorageError):  # the first error says it
            storage.delete(path)
    storage.expect_mark()
