"""Every error a person can meet, as one tree.

    DraftfleetError
    ├── SettingsError            a knob that is unknown, or holds a value it may not hold
    ├── DataError                a data set that cannot be read as conversations
    ├── RunError                 the folder of a run and what may be done with it
    │   ├── RunMissing           no run of that name in this storage
    │   ├── RunConflict          the run exists with other content settings
    │   ├── RunBusy              another process holds what only one may hold
    │   └── RunNewer             a newer draftfleet made it: nothing of it is touched
    ├── QueueError               Redis is away
    │   ├── QueueRefused         it refuses our login: waiting does not help
    │   └── NewerMessage         a message that is left to a newer draftfleet
    ├── StorageError             the shared folder failed
    │   ├── StorageUnsafe        it cannot put a file only if absent
    │   ├── StorageUnwritable    it is full or read-only: the node pauses
    │   ├── StorageUnreadable    it does not answer: the node pauses
    │   ├── CorruptFile          a file that exists and cannot be read
    │   └── NewerFile            a newer draftfleet wrote it: sound, and nothing of it is read
    ├── ServerError              an inference server, or its answer to one request
    │   ├── NotReady             it did not get ready within its budget
    │   ├── Mismatch             it serves something else than the run asks for
    │   ├── Unauthorized         it wants another key: 401, 403               stops the worker
    │   ├── BadRequest           it refused this row: 400, 404, 413, 422       never retried
    │   ├── Overload             it is full: 429, 503                          retried
    │   └── Transient            it broke off: reset, 5xx, abort               retried
    ├── HubError                 the Hugging Face Hub refused an upload, or cannot be reached
    └── TrainingError            the trainer, its target, or a drafter folder
        ├── TargetError          the target cannot be loaded or does not fit the samples
        └── DrafterError         a drafter folder with wrong, missing or extra parts

A message says what happened, the value, what is allowed and what to do. Whether a request is retried is decided here,
once, by type.
"""

from __future__ import annotations

from typing import ClassVar, Literal, TypeAlias

ErrorKind: TypeAlias = Literal["bad_request", "transient", "crash", "worker", "unusable"]
"""Why a row failed: refused; broken off, too often; servers ended on it; workers ended on it; answers of no sense."""


class DraftfleetError(Exception):
    """The root. The command line prints its message without a traceback and exits with `exit_code`."""

    exit_code: ClassVar[int] = 1


class SettingsError(DraftfleetError):
    exit_code = 2


class DataError(DraftfleetError):
    exit_code = 3


class RunError(DraftfleetError):
    exit_code = 4


class RunMissing(RunError): ...


class RunConflict(RunError): ...


class RunBusy(RunError): ...


class RunNewer(RunError):
    """`version` is the run's; 0 where it is not told."""

    def __init__(self, message: str, version: int = 0) -> None:
        super().__init__(message)
        self.version = version


class QueueError(DraftfleetError):
    exit_code = 5


class QueueRefused(QueueError): ...


class NewerMessage(QueueError):
    """`version` is the message's; 0 where it is not told."""

    def __init__(self, message: str, version: int = 0) -> None:
        super().__init__(message)
        self.version = version


class StorageError(DraftfleetError):
    exit_code = 6


class StorageUnsafe(StorageError): ...


class StorageUnwritable(StorageError): ...


class StorageUnreadable(StorageError): ...


class CorruptFile(StorageError): ...


class NewerFile(StorageError): ...


class ServerError(DraftfleetError):
    """`retryable` tells the worker whether the same row may be asked again; `kind` is what a row is said to fail of.

    `status` is the HTTP status, where there was one. `body` is the start of what the server answered. It may quote the
    prompt: logs show `summary`, which is without it.
    """

    exit_code = 7
    retryable: ClassVar[bool] = False
    kind: ErrorKind = "transient"

    def __init__(
        self, message: str, *, status: int | None = None, body: str = "", kind: ErrorKind | None = None
    ) -> None:
        super().__init__(f"{message}: {body!r}" if body else message)
        self.summary = message
        self.status = status
        self.body = body
        self.kind = kind or self.kind


class NotReady(ServerError): ...


class Mismatch(ServerError): ...


class Unauthorized(ServerError): ...


class BadRequest(ServerError):
    """The server refused this row."""

    kind = "bad_request"


class Overload(ServerError):
    """`retry_after_s` is what the server asked for, where it did."""

    retryable = True

    def __init__(
        self, message: str, *, status: int | None = None, retry_after_s: float | None = None, body: str = ""
    ) -> None:
        super().__init__(message, status=status, body=body)
        self.retry_after_s = retry_after_s


class Transient(ServerError):
    """`is_broken`: the connection broke in mid-answer, as when the server ended."""

    retryable = True

    def __init__(
        self,
        message: str,
        *,
        status: int | None = None,
        body: str = "",
        kind: ErrorKind | None = None,
        is_broken: bool = False,
    ) -> None:
        super().__init__(message, status=status, body=body, kind=kind)
        self.is_broken = is_broken


class HubError(DraftfleetError):
    exit_code = 9


class TrainingError(DraftfleetError):
    exit_code = 8


class TargetError(TrainingError): ...


class DrafterError(TrainingError): ...
