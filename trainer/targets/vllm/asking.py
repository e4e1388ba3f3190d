"""Rows asked of the servers, by one event loop in a thread of its own, and asked again where that helps."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

from draftfleet.errors import BadRequest, Mismatch, Overload, TargetError, Transient, Unauthorized
from draftfleet.logs import event
from draftfleet.settings.capturing import Capture
from trainer.targets import Row
from trainer.targets.vllm import states
from trainer.targets.vllm.examining import Examiner
from trainer.targets.vllm.fetching import states_of
from trainer.targets.vllm.servers import Server, Servers
from trainer.targets.vllm.spool import Room, Spool

log = logging.getLogger(__name__)

END_S = 8.0
"""How long the servers may take to end what they are at, when a training ends. A child has 45 s to end."""

MOST_TRIES = 8
"""A row that fails this often, while the servers answer others, ends the training: it may be what brings them down."""

SWEEP_S = 2.0
SAY_EVERY_S = 30.0


@dataclass(eq=False, slots=True)
class Asked:
    """A row on its way. `answer` is its file, or None if the servers refuse the row."""

    row: Row
    num_bytes: int  # that its file takes
    answer: Future[Path | None] = field(default_factory=Future[Path | None])
    request: str = ""  # the name of the latest try
    mismatches: int = 0
    tries: int = 0  # that failed at a server which answers others
    failed_at: float = 0.0  # time.monotonic()
    refused: str = ""  # what the servers said


class Asking:
    """Made for one capture, and closed with it."""

    def __init__(self, knobs: Capture, servers: Servers, spool: Spool, examiner: Examiner) -> None:
        self._knobs, self._servers, self._spool = knobs, servers, spool
        self._examiner = examiner
        self._room = Room(spool.limit_bytes)
        self._tasks: set[asyncio.Task[None]] = set()
        self._strays: set[str] = set()  # tries that were given up: their files may still come
        self._said = 0.0
        self._began = time.monotonic()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="capture", daemon=True)
        self._thread.start()

    def ask(self, one: Asked) -> bool:
        """Wait for room in the spool, and begin. False if this was closed before."""
        if not self._room.take(one.num_bytes):
            return False
        self._start(one)
        return True

    def ask_again(self, one: Asked, wrong: Mismatch) -> None:
        """What came in time turned out to be wrong when it was read."""
        one.answer = Future()
        try:
            self._note_mismatch(one, wrong)
        except TargetError as error:
            one.answer.set_exception(error)
        else:
            self._start(one)

    def done(self, one: Asked) -> None:
        """Its file has been read: delete it, and give the room back."""
        if one.answer.done() and not one.answer.exception() and (file := one.answer.result()):
            self._spool.remove(file)
        self._room.give_back(one.num_bytes)

    def close(self) -> None:
        """Let the servers end what they are at, drop what has not begun, and leave nothing in the spool."""
        self._room.close()
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._spool.sweep()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        sweeping = self._loop.create_task(self._sweep())
        self._loop.run_forever()
        sweeping.cancel()
        self._loop.run_until_complete(asyncio.gather(sweeping, return_exceptions=True))

    def _start(self, one: Asked) -> None:
        self._loop.call_soon_threadsafe(self._begin, one)

    def _begin(self, one: Asked) -> None:
        task = self._loop.create_task(self._answer(one))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, one: Asked) -> None:
        try:
            one.answer.set_result(await self._file_of(one))
        except asyncio.CancelledError:
            one.answer.cancel()
        except Exception as error:
            one.answer.set_exception(error)

    async def _file_of(self, one: Asked) -> Path | None:
        refused, failed = set[Server](), set[Server]()
        while True:
            async with self._servers.one(refused | failed) as server:
                try:
                    file = await self._try(server, one)
                except Unauthorized as error:
                    raise TargetError(str(error)) from None
                except BadRequest as error:
                    others = {other for other in self._servers.all if not other.failures} - refused - {server}
                    if server in refused or not others:
                        one.refused = error.summary + (f": {error.body}" if error.body else "")
                        return None
                    refused.add(server)
                except Mismatch as error:
                    failed = {server}
                    self._note_mismatch(one, error)
                except (Overload, Transient) as error:
                    failed = {server}
                    self._strays.add(one.request)
                    server.failed(error)
                    self._wait_or_give_up(one, server, error)
                else:
                    server.answered()
                    return file

    async def _try(self, server: Server, one: Asked) -> Path:
        """Raises ServerError, and TargetError of a server that came back as another."""
        async with server.looking:
            if not server.is_known:
                await self._examiner.examine(self._servers, server)
        one.request = self._spool.new_request()
        file, _ = await states_of(
            self._servers, server, self._spool, ids=one.row.ids, form=self._examiner.form, request=one.request
        )
        return file

    def _note_mismatch(self, one: Asked, wrong: Mismatch) -> None:
        """Once it is asked again: a file may have been torn. Raises TargetError the second time."""
        one.mismatches += 1
        log.warning(event("states asked for again", row=one.row.key, error=wrong))
        if one.mismatches == 1:
            return
        free = self._spool.free_bytes()
        if isinstance(wrong, states.Torn) and free < one.num_bytes:
            raise TargetError(
                f"the disk of capture.folder = {self._spool.folder} is full: {free / 1e9:.2f} GB are free, the states "
                f"of row {one.row.key} take {one.num_bytes / 1e9:.2f} GB. Make room, or lower capture.spool_gb."
            )
        raise TargetError(f"the hidden states of row {one.row.key} came wrong twice: {wrong}.")

    def _wait_or_give_up(self, one: Asked, server: Server, error: Overload | Transient) -> None:
        """Raises TargetError once no server has answered anything for long, or this row failed often."""
        now = time.monotonic()
        one.tries += server.answered_at > one.failed_at
        one.failed_at = now
        silent_s = now - max(self._began, *(server.answered_at for server in self._servers.all))
        if silent_s > self._knobs.ready_timeout_s:
            raise TargetError(
                f"no server of capture.servers gave hidden states for {silent_s:.0f} s (capture.ready_timeout_s), of "
                f"row {one.row.key} for one: {error}. See the logs of the servers; `draftfleet capture-command` prints "
                "how to start one."
            )
        if one.tries >= MOST_TRIES:
            raise TargetError(
                f"row {one.row.key} of {len(one.row.ids)} tokens failed {one.tries} times, while the servers of "
                f"capture.servers answered others: {error}. See their logs."
            )
        if now - self._said > SAY_EVERY_S:
            self._said = now
            log.warning(event("waiting for capture servers", error=error.summary))

    async def _sweep(self) -> None:
        """Remove what still comes of tries that were given up."""
        while True:
            await asyncio.sleep(SWEEP_S)
            if self._strays:
                self._spool.remove_requests(self._strays)

    async def _end(self) -> None:
        await self._servers.end(END_S)
        left = list(self._tasks)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        await self._servers.close()
