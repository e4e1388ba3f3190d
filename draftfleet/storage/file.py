"""A POSIX folder, local or NFS, as the shared storage."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import socket
import uuid
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import repeat
from pathlib import Path, PurePosixPath

from draftfleet.errors import StorageError, StorageUnreadable, StorageUnsafe, StorageUnwritable

WRONG_PATH = {errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.EINVAL, errno.ELOOP}
"""Faults that no waiting mends. All others are the folder's: the node pauses and tries again, nothing is given up."""

NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}
"""What a file system without hard links answers: FAT, and some that live in user space."""

PROBED = ".probe"
"""The folder that a probe leaves. A mount point without its file system is an empty folder, and has none."""

FOLDER = os.O_RDONLY | os.O_DIRECTORY

SYNCS = 8
"""Files that are synced at once: on a disk of ours 181 a second one by one, 1,136 with 8, and no more with 16."""


class FileStorage:
    """`link` puts only if absent, where `rename` would replace.

    Files are written through the folder that was opened, not through its name: what is unmounted or moved in between
    cannot divert them to another folder. An absent file is believed only where the mark of the probe is there.
    """

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root).expanduser().absolute()
        self.url = f"file://{self.root}"
        self._is_marked = False

    def put_if_absent(self, path: str, data: bytes) -> bool:
        with self._staged(path, data) as (folder, staged, name):
            if not self._linked(folder, staged, name):
                return False
            os.fsync(folder)
            return True

    def put_in_order(self, files: Sequence[tuple[str, bytes]]) -> int:
        """Their contents are synced side by side, since most of that is waiting; their names are given in order."""
        if not files:
            return 0
        with self._writing(files[0][0]), self._folder(files[0][0]) as (folder, _), contextlib.ExitStack() as stack:
            names = [PurePosixPath(path).name for path, _ in files]
            staged = [_staged_name(name) for name in names]
            for one in staged:
                stack.callback(_unlink, folder, one)
            with ThreadPoolExecutor(min(SYNCS, len(files))) as pool:
                list(pool.map(_stage, repeat(folder), staged, (data for _, data in files)))
            num_put = 0
            for one, name in zip(staged, names, strict=True):
                if not self._linked(folder, one, name):
                    break
                num_put += 1
            os.fsync(folder)
            return num_put

    def put(self, path: str, data: bytes) -> None:
        with self._staged(path, data) as (folder, staged, name):
            os.replace(staged, name, src_dir_fd=folder, dst_dir_fd=folder)
            os.fsync(folder)

    def read(self, path: str) -> bytes:
        with self._reading(path):
            return (self.root / path).read_bytes()

    def exists(self, path: str) -> bool:
        try:
            with self._reading(path):
                (self.root / path).stat()
        except FileNotFoundError:
            return False
        return True

    def list(self, folder: str) -> Iterator[str]:
        return (entry.name for entry in self._entries(folder) if entry.is_file())

    def sizes(self, folder: str) -> dict[str, int]:
        found: dict[str, int] = {}
        for entry in self._entries(folder):
            with contextlib.suppress(FileNotFoundError):  # gone since it was listed
                if entry.is_file():
                    found[entry.name] = entry.stat().st_size
        return found

    def folders(self, folder: str = "") -> Iterator[str]:
        return (entry.name for entry in self._entries(folder) if entry.is_dir())

    def free_bytes(self) -> int | None:
        with self._reading(""):
            space = os.statvfs(self.root)
        return space.f_bavail * space.f_frsize

    def delete(self, path: str) -> None:
        with self._writing(path):
            (self.root / path).unlink(missing_ok=True)

    def delete_folder(self, path: str) -> None:
        with self._writing(path), contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self.root / path)

    def rename(self, path: str, new_path: str) -> None:
        with self._writing(new_path), self._folder(new_path) as (folder, name):
            os.rename(self.root / path, name, dst_dir_fd=folder)
            os.fsync(folder)

    def expect_mark(self) -> None:
        self._is_marked = True

    def local(self, path: str) -> Path:
        self._refuse_outside(path)
        return self.root / path

    def share(self, path: str) -> None:
        """Nothing to do: the folder is the storage."""

    def fetch(self, path: str) -> None:
        """Nothing to do: the folder is the storage."""

    def _refuse_outside(self, path: str) -> None:
        """Names are checked where they come in; should one slip through, it still leads nowhere else."""
        if path.startswith("/") or ".." in path.split("/") or "\0" in path:
            raise StorageError(f"{path!r} leads out of {self.url}: a path in the storage is relative, without `..`.")

    @contextmanager
    def _staged(self, path: str, data: bytes) -> Generator[tuple[int, str, str]]:
        """The data under another name beside its own: the open folder, that name, and its own."""
        with self._writing(path), self._folder(path) as (folder, name):
            staged = _staged_name(name)
            try:
                _stage(folder, staged, data)
                yield folder, staged, name
            finally:
                _unlink(folder, staged)

    def _linked(self, folder: int, staged: str, name: str) -> bool:
        """Give a staged file its own name. False if that is another's."""
        try:
            os.link(staged, name, src_dir_fd=folder, dst_dir_fd=folder)
        except FileExistsError:
            # NFS may report an error for a link that it made: the inode tells.
            return os.stat(staged, dir_fd=folder).st_ino == os.stat(name, dir_fd=folder).st_ino
        except OSError as error:
            if error.errno in NO_LINKS:
                raise StorageUnsafe(
                    f"{self.url} has no hard links ({error.strerror}): two workers could overwrite each other's "
                    "samples. Use a POSIX file system that has them."
                ) from error
            raise
        return True

    @contextmanager
    def _folder(self, path: str) -> Generator[tuple[int, str]]:
        """The folder of a file, opened, and the file's name in it. Made where it is missing."""
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(self._root())
            *parents, name = PurePosixPath(path).parts
            for parent in parents:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(parent, dir_fd=folder)
                folder = os.open(parent, FOLDER, dir_fd=folder)
                stack.callback(os.close, folder)
            yield folder, name

    @contextmanager
    def _root(self) -> Generator[int]:
        """The storage's own folder, opened and looked at: every path of a write begins there."""
        if not self._is_marked:
            self.root.mkdir(parents=True, exist_ok=True)
        try:
            root = os.open(self.root, FOLDER)
        except FileNotFoundError:
            raise self._unmounted() from None
        try:
            if self._is_marked:
                self._check_mark(root)
            yield root
        finally:
            os.close(root)

    def _check_mark(self, root: int | None = None) -> None:
        """Raises StorageUnreadable if the folder lacks the mark: it is not the one that was probed."""
        try:
            os.stat(PROBED if root is not None else self.root / PROBED, dir_fd=root)
        except FileNotFoundError:
            raise self._unmounted() from None

    def _unmounted(self) -> StorageUnreadable:
        return StorageUnreadable(
            f"{self.url} has no folder {PROBED}, which was made there at the start: mount the file system again, "
            "or make the folder anew if it was deleted. Nothing was lost, work goes on by itself."
        )

    def _entries(self, folder: str) -> Iterator[os.DirEntry[str]]:
        """What is in a folder and not hidden; nothing if the folder is not there."""
        try:
            with self._reading(folder), os.scandir(self.root / folder) as entries:
                yield from (entry for entry in entries if not entry.name.startswith("."))
        except FileNotFoundError:
            return

    @contextmanager
    def _reading(self, path: str) -> Generator[None]:
        self._refuse_outside(path)
        try:
            yield
        except FileNotFoundError:
            if self._is_marked:
                self._check_mark()
            raise
        except OSError as error:
            raise StorageUnreadable(
                f"could not read {self.root / path}: {error.strerror}. Correct storage.url, or mend the folder."
            ) from error

    @contextmanager
    def _writing(self, path: str) -> Generator[None]:
        self._refuse_outside(path)
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
                f"could not write {self.root / path}: {error.strerror}. Make room or make it writable. Nothing was "
                "lost: workers go on by themselves, any other command is to be run again."
            ) from error


def _staged_name(name: str) -> str:
    """Hidden, and of this process alone."""
    return f".{name}.{socket.gethostname()}.{os.getpid()}.{uuid.uuid4().hex[:8]}"


def _stage(folder: int, staged: str, data: bytes) -> None:
    with open(staged, "xb", opener=lambda file, flags: os.open(file, flags, dir_fd=folder)) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _unlink(folder: int, staged: str) -> None:
    with contextlib.suppress(OSError):  # what kept it from being written may keep it from being deleted
        os.unlink(staged, dir_fd=folder)
