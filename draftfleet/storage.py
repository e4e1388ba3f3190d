"""The shared folder: put only if absent, read, list. A reader never sees half a file.

What the fleet needs of a storage is small and strict: of two processes that put the same path at the same time, one
wins and the other is told so. `probe` proves it before anything is entrusted to it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import uuid
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from draftfleet.errors import StorageError, StorageUnreadable, StorageUnsafe, StorageUnwritable

WRONG_PATH = {errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.EINVAL, errno.ELOOP}
"""Faults that no waiting mends. All others are the folder's: the node pauses and tries again, nothing is given up."""

NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}
"""What a file system without hard links answers: FAT, and some that live in user space."""


PROBED = ".probe"
"""The folder that `probe` leaves in every storage."""


class Storage(Protocol):
    """Paths are relative, with `/`; their folders need not exist.

    Writes raise StorageUnwritable when it is full or read-only, reads StorageUnreadable when it does not answer.
    """

    url: str

    def put_if_absent(self, path: str, data: bytes) -> bool:
        """Put the file unless it is there. True if this call put it. Durable on return."""
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

    def folders(self) -> Iterator[str]:
        """Names of the folders at the top, in no order."""
        ...

    def delete(self, path: str) -> None:
        """Delete the file if it is there."""
        ...

    def rename(self, path: str, new_path: str) -> None:
        """Move a file aside. Raises FileNotFoundError."""
        ...

    def local(self, path: str) -> Path:
        """The same path for code that needs a real folder. Raises StorageError where the storage has none."""
        ...


class FileStorage:
    """A POSIX folder, local or NFS. `link` puts only if absent, where `rename` would replace."""

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root).expanduser().absolute()
        self.url = f"file://{self.root}"

    def put_if_absent(self, path: str, data: bytes) -> bool:
        with self._staged(path, data) as (staged, final):
            try:
                os.link(staged, final)
            except FileExistsError:
                # NFS may report an error for a link that it made: the inode tells.
                return os.stat(staged).st_ino == os.stat(final).st_ino
            except OSError as error:
                if error.errno in NO_LINKS:
                    raise StorageUnsafe(
                        f"{self.url} has no hard links ({error.strerror}): two workers could overwrite each other's "
                        "samples. Use a POSIX file system that has them."
                    ) from error
                raise
            _sync_folder(final.parent)
            return True

    def put(self, path: str, data: bytes) -> None:
        with self._staged(path, data) as (staged, final):
            os.replace(staged, final)
            _sync_folder(final.parent)

    def read(self, path: str) -> bytes:
        with self._reading(path):
            return (self.root / path).read_bytes()

    def exists(self, path: str) -> bool:
        with self._reading(path):
            return (self.root / path).exists()

    def list(self, folder: str) -> Iterator[str]:
        return (entry.name for entry in self._entries(folder) if entry.is_file())

    def folders(self) -> Iterator[str]:
        return (entry.name for entry in self._entries("") if entry.is_dir())

    def delete(self, path: str) -> None:
        with self._writing(path):
            (self.root / path).unlink(missing_ok=True)

    def rename(self, path: str, new_path: str) -> None:
        final = self.root / new_path
        with self._writing(new_path):
            final.parent.mkdir(parents=True, exist_ok=True)
            (self.root / path).rename(final)
            _sync_folder(final.parent)

    def local(self, path: str) -> Path:
        return self.root / path

    @contextmanager
    def _staged(self, path: str, data: bytes) -> Generator[tuple[Path, Path]]:
        final = self.root / path
        staged = final.parent / f".{final.name}.{socket.gethostname()}.{os.getpid()}.{uuid.uuid4().hex[:8]}"
        try:
            with self._writing(path):
                final.parent.mkdir(parents=True, exist_ok=True)
                with staged.open("wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                yield staged, final
        finally:
            with contextlib.suppress(OSError):  # what kept it from being written may keep it from being deleted
                staged.unlink(missing_ok=True)

    def _entries(self, folder: str) -> Iterator[os.DirEntry[str]]:
        """What is in a folder and not hidden; nothing if the folder is not there."""
        try:
            with self._reading(folder), os.scandir(self.root / folder) as entries:
                yield from (entry for entry in entries if not entry.name.startswith("."))
        except FileNotFoundError:
            return

    @contextmanager
    def _reading(self, path: str) -> Generator[None]:
        try:
            yield
        except FileNotFoundError:
            raise
        except OSError as error:
            raise StorageUnreadable(
                f"could not read {self.root / path}: {error.strerror}. Correct storage.url, or mend the folder."
            ) from error

    @contextmanager
    def _writing(self, path: str) -> Generator[None]:
        try:
            yield
        except FileNotFoundError:
            raise
        except OSError as error:
            if error.errno in WRONG_PATH:
                raise StorageError(
                    f"could not write {self.root / path}: {error.strerror}. Correct storage.url, or move away what is "
                    "in the way."
                ) from error
            raise StorageUnwritable(
                f"could not write {self.root / path}: {error.strerror}. Make room or make it writable; nothing was "
                "lost, work goes on by itself."
            ) from error


def open_storage(url: str) -> Storage:
    """The storage behind `file://FOLDER` or a plain path. Raises StorageError on another scheme."""
    parts = urlsplit(url)
    if parts.scheme not in ("", "file"):
        raise StorageError(f"storage.url = {url}: {parts.scheme}:// is not known; use file://FOLDER or a plain path.")
    return FileStorage(url.removeprefix("file://"))


def probe(storage: Storage) -> None:
    """Prove that it can be written, and that of two puts of one path the second is refused.

    Raises StorageUnwritable, or StorageUnsafe where both puts succeed.
    """
    path = f"{PROBED}/{uuid.uuid4().hex}"
    try:
        first, second = storage.put_if_absent(path, b"first"), storage.put_if_absent(path, b"second")
        if (first, second) != (True, False) or storage.read(path) != b"first":
            raise StorageUnsafe(
                f"{storage.url} let two writers put the same file: two workers could overwrite each other's samples. "
                "Use a POSIX file system with hard links."
            )
    finally:
        with contextlib.suppress(StorageError):  # the first error says it
            storage.delete(path)


def check_mounted(storage: Storage) -> None:
    """Raises StorageUnreadable if this is not the folder that was probed: a mount point without its file system is
    an empty folder, in which no batch has prompts and into which shards can be written."""
    if not storage.exists(PROBED):
        raise StorageUnreadable(
            f"{storage.url} has no folder {PROBED}, which was made there at the start: mount the file system again, "
            "or make the folder anew if it was deleted. Nothing was lost, work goes on by itself."
        )


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
