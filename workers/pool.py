"""One pool of rows over all servers: a slot that gets free takes the next row at once. Lives in the event loop.

waiting -> in flight -> finished
   ^          |
   +- later <-+   a transient fault: back-off without a slot, then elsewhere if possible

A row that was in flight when its server ended is a suspect: a server gets one suspect at a time, beside other rows. If
that server ends as well the suspect is accused, and gets a server to itself. If it ends that one too, it is parked.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field

from draftfleet.errors import BadRequest, DraftfleetError, Mismatch, Overload, ServerError, Transient, Unauthorized
from draftfleet.live import LengthsReport
from draftfleet.logs import event
from draftfleet.records import Sample
from workers.batch import Batch, Row
from workers.lengths import LengthsSeen, tokens_made
from workers.servers import Server, Servers
from workers.tally import Tally

log = logging.getLogger(__name__)

Ask = Callable[[Row, Server], Awaitable[Sample]]
"""Asks one server for one row. Raises ServerError."""

Refuse = Callable[[Row, str, ServerError], Sample]
"""The record of a row that ends without an answer: row, server, why."""

Clear = Callable[[Server, Batch, Sequence[Row]], object]
"""Lets a server try a run before it gets the run's rows. Calls `fill` when it is through."""

LONGEST_BACKOFF_S = 60.0


@dataclass(slots=True)
class Waiting:
    """Rows of one run that wait for a slot."""

    rows: deque[Row] = field(default_factory=deque[Row])
    suspects: deque[Row] = field(default_factory=deque[Row])
    accused: deque[Row] = field(default_factory=deque[Row])

    def like(self, row: Row) -> deque[Row]:
        """Those that wait with it."""
        return self.accused if row.is_accused else self.suspects if row.is_suspect else self.rows

    def all(self) -> list[Row]:
        return [*self.rows, *self.suspects, *self.accused]

    def without(self, batch: Batch) -> Waiting:
        kept = ((row for row in rows if row.batch is not batch) for rows in (self.rows, self.suspects, self.accused))
        return Waiting(*map(deque, kept))


class Pool:
    """`fatal` is told of errors after which no row can succeed. Rows of a run of lower `rank_of` go first."""

    def __init__(
        self,
        servers: Servers,
        ask: Ask,
        refuse: Refuse,
        clear: Clear,
        fatal: Callable[[DraftfleetError], object],
        *,
        max_tries: int,
        tally: Tally | None = None,
    ) -> None:
        self._servers = servers
        self._ask = ask
        self._refuse = refuse
        self._clear = clear
        self._fatal = fatal
        self._max_tries = max_tries
        self.rank_of: Callable[[str], int] = lambda run_id: 0
        self._tally = tally or Tally()
        self._lengths = LengthsSeen()
        self._paused = False
        self._draining = False
        self._waiting: dict[str, Waiting] = {}
        self._tasks: dict[asyncio.Task[None], Row] = {}
        self._slots: dict[asyncio.Task[None], Server] = {}
        self._later: dict[Row, asyncio.TimerHandle] = {}
        self._recalled: set[asyncio.Task[None]] = set()
        self._kept: tuple[Server, Row] | None = None
        self._idle = asyncio.Event()

    @property
    def num_waiting(self) -> int:
        """Rows that have not been started, or wait to be started again."""
        return sum(len(one.rows) + len(one.suspects) + len(one.accused) for one in list(self._waiting.values()))

    @property
    def num_in_flight(self) -> int:
        return len(self._tasks)

    def lengths(self) -> dict[str, list[LengthsReport]]:
        """Of answers, by run id."""
        slots = list(self._slots.items())
        return self._lengths.reports((row, server) for task, server in slots if (row := self._tasks.get(task)))

    def submit(self, batch: Batch, rows: Sequence[Row]) -> None:
        if not batch.stopped and not batch.is_retired:
            waiting = self._waiting.setdefault(batch.run.run_id, Waiting())
            for row in rows:
                waiting.like(row).append(row)
            self.fill()

    def pause(self, paused: bool) -> None:
        """Start no rows while paused. Those in flight go on."""
        self._paused = paused
        self.fill()

    def fill(self) -> None:
        """Give every free slot a row."""
        if self._paused or self._draining:
            return
        self._keep_a_server()
        while chosen := self._next():
            self._start(*chosen)
        for server in self._servers.ready:
            for run_id, waiting in self._waiting.items():
                if run_id not in server.cleared and (rows := waiting.all()):
                    self._clear(server, rows[0].batch, rows)

    async def recall(self, server: Server, most: int | None = None) -> int:
        """Take rows back from a server, the youngest first, for other slots: no try is counted. Returns how many."""
        tasks = [task for task, its in self._slots.items() if its is server][::-1][:most]
        if most is None:
            for task in tasks:
                self._tally.wasted(
                    server.url, "stalled", tokens_made(self._tasks[task], server, self._tasks[task].moved())
                )
        self._recalled.update(tasks)
        await self._cancel(tasks)
        return sum(task.cancelled() for task in tasks)

    async def drop(self, batch: Batch) -> None:
        """Forget the rows of a batch, in whatever state they are."""
        batch.is_retired = True
        self._withdraw(batch)
        await self._cancel([task for task, row in self._tasks.items() if row.batch is batch])
        self.fill()

    async def retire(self, batches: Collection[Batch], patience_s: float) -> None:
        """Start no more rows of these batches, and wait at most `patience_s` for those in flight. `drop` ends them."""
        for batch in batches:
            batch.is_retired = True
            self._withdraw(batch)
        self.fill()
        if in_flight := [task for task, row in self._tasks.items() if row.batch in batches]:
            await asyncio.wait(in_flight, timeout=patience_s)

    def _withdraw(self, batch: Batch) -> None:
        """Its rows that wait, for a slot or for another try, wait no longer."""
        self._waiting = {run_id: one.without(batch) for run_id, one in self._waiting.items()}
        for row in [row for row in self._later if row.batch is batch]:
            self._later.pop(row).cancel()

    async def drain(self, patience_s: float, hurry: asyncio.Event) -> None:
        """Start nothing more, wait for what is in flight, cancel what is left after `patience_s` or at `hurry`."""
        self._draining = True
        waits = [asyncio.ensure_future(hurry.wait()), asyncio.ensure_future(self._until_idle())]
        await asyncio.wait(waits, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        await self._cancel(list(self._tasks))

    def _keep_a_server(self) -> None:
        """While a row is accused, the emptiest server is kept for it: one at a time, the others go on."""
        if self._kept and not self._is_still_kept(*self._kept):
            self._kept[0].is_kept = False
            self._kept = None
        if self._kept:
            return
        for run_id, waiting in self._waiting.items():
            free = [server for server in self._servers.ready if run_id in server.cleared and not server.held_s]
            if waiting.accused and free:
                row = waiting.accused[0]
                server = min(free, key=lambda one: (one.url == row.avoid, one.in_flight))
                server.is_kept, self._kept = True, (server, row)
                return

    def _is_still_kept(self, server: Server, row: Row) -> bool:
        run_id = row.batch.run.run_id
        if row in self._waiting.get(run_id, Waiting()).accused:
            return server.state == "ready" and run_id in server.cleared
        return any(self._tasks[task] is row for task in self._slots)

    def _next(self) -> tuple[Row, Server] | None:
        if self._kept and not self._kept[0].in_flight and not self._kept[0].held_s:
            server, row = self._kept
            self._waiting[row.batch.run.run_id].accused.remove(row)
            return row, server
        for _, waiting in sorted(self._waiting.items(), key=lambda one: self.rank_of(one[0])):
            for rows, alone in ((waiting.suspects, True), (waiting.rows, False)):
                if rows and (server := self._pick(rows[0], alone=alone)):
                    return rows.popleft(), server
        return None

    def _pick(self, row: Row, *, alone: bool) -> Server | None:
        return self._servers.pick(row.batch.run.run_id, avoid=row.avoid, prefer=row.prefer, alone=alone)

    def _start(self, row: Row, server: Server) -> None:
        server.begin(is_suspect=row.is_suspect)
        self._tally.waited(row.moved())
        task = asyncio.create_task(self._work(row, server))
        self._tasks[task], self._slots[task] = row, server
        self._idle.clear()
        task.add_done_callback(self._ended)

    def _free_slot(self, task: asyncio.Task[None] | None, row: Row) -> None:
        """Once per task: before a fault is looked into, else at its end, which comes even if it never began."""
        if task and (server := self._slots.pop(task, None)):
            server.in_flight -= 1
            server.suspects -= row.is_suspect

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Whatever ended it, a row that has no answer waits again: who cancels it may be cancelled in its turn."""
        row, server = self._tasks.pop(task), self._slots.get(task)
        self._free_slot(task, row)
        self._recalled.discard(task)
        if not self._tasks:
            self._idle.set()
        if task.cancelled():
            row.avoid = server.url if server else row.avoid
            self._again(row)
        elif error := task.exception():
            log.error(event("row lost its task", batch=row.batch.name, error=repr(error)), exc_info=error)
            self._later[row] = asyncio.get_running_loop().call_later(LONGEST_BACKOFF_S, self._again, row)
        self.fill()

    async def _work(self, row: Row, server: Server) -> None:
        fault: ServerError | None = None
        try:
            sample = await self._ask(row, server)
            self._free_slot(asyncio.current_task(), row)  # before the row turns to what is asked next
            tokens, seconds = row.cost(sample)
            row.generated += max(tokens, 0)
            kept = row.answered(sample)
        except ServerError as error:
            fault = error
        except asyncio.CancelledError:
            if asyncio.current_task() not in self._recalled:
                cause = "lost claim" if row.batch.stopped == "lost" else "drained"
                self._tally.wasted(server.url, cause, tokens_made(row, server, row.moved()))
            raise
        except Exception as error:
            log.exception(event("row raised", batch=row.batch.name, row=row.prompt.row_key, server=server.url))
            fault = Transient(f"the worker could not handle the answer of {server.url}: {error!r}", kind="unusable")
        else:
            server.completed(max(tokens, 0), seconds)
            self._tally.answer(server.url, kept, tokens, seconds)
            row.batch.finish(kept)
            if kept.outcome == "unfinished":
                self._again(row)
            else:
                self._lengths.end(row)
        if fault is not None:
            self._tally.faulted(server.url, fault, tokens_made(row, server, row.moved()))
            self._free_slot(asyncio.current_task(), row)
            self.fill()  # the slot is another's while the fault is looked into
            await self._faulted(row, server, fault)

    async def _faulted(self, row: Row, server: Server, fault: ServerError) -> None:
        row.avoid = server.url
        server.ended += 1
        if isinstance(fault, BadRequest):
            self._give_up(row, server, fault)
        elif isinstance(fault, Overload):
            asyncio.get_running_loop().call_later(server.overloaded(fault.retry_after_s), self.fill)
            self._again(row)
        elif isinstance(fault, Unauthorized):
            self._fatal(fault)
        elif not await self._servers.confirm(server):
            self._bereaved(row, server, fault)
        elif isinstance(fault, Mismatch):
            # It still lists the model and refuses requests for it: the canary shall look again.
            server.cleared.discard(row.batch.run.run_id)
            self._back_off(row, server, fault)
        else:
            self._servers.broke(server, fault)
            self._back_off(row, server, fault)

    def _bereaved(self, row: Row, server: Server, fault: ServerError) -> None:
        """The server is gone. That is no fault of the row, unless it happens again and again."""
        was_accused = row.is_accused
        row.deaths += server.refused
        if was_accused and server.refused:
            text = f"{row.deaths} servers ended while they worked on this row, the last, {server.url}, on nothing else"
            self._give_up(row, server, Transient(f"{text}: {fault.summary}", body=fault.body, kind="crash"))
        else:
            self._again(row)

    def _back_off(self, row: Row, server: Server, fault: ServerError) -> None:
        row.tries += 1
        row.breaks += isinstance(fault, Transient) and fault.is_broken
        if row.tries >= self._max_tries:
            text = f"no answer in {row.tries} tries (worker.max_tries); the last: {fault.summary}"
            self._give_up(row, server, Transient(text, status=fault.status, body=fault.body, kind=fault.kind))
            return
        delay_s = min(LONGEST_BACKOFF_S, 0.5 * 2 ** (row.tries - 1)) * random.uniform(0.5, 1.0)
        log.info(
            event(
                "row to be tried again",
                batch=row.batch.name,
                row=row.prompt.row_key,
                server=server.url,
                tries=row.tries,
                seconds=delay_s,
                error=fault.summary,
            )
        )
        self._later[row] = asyncio.get_running_loop().call_later(delay_s, self._again, row)

    def _again(self, row: Row) -> None:
        """To the head of the queue: its batch is the oldest."""
        self._later.pop(row, None)
        if row.batch.stopped or row.batch.is_retired:
            return
        row.moved()
        waiting = self._waiting.setdefault(row.batch.run.run_id, Waiting())
        waiting.like(row).appendleft(row)
        self.fill()

    def _give_up(self, row: Row, server: Server, fault: ServerError) -> None:
        sample = row.answered(self._refuse(row, server.url, fault))
        row_key, error = row.prompt.row_key, fault.summary
        log.warning(event("row failed", batch=row.batch.name, row=row_key, server=server.url, error=error))
        self._tally.answer(server.url, sample, 0, 0)
        row.batch.finish(sample)
        self._lengths.end(row)

    async def _until_idle(self) -> None:
        while self._tasks:
            self._idle.clear()
            await self._idle.wait()

    async def _cancel(self, tasks: Sequence[asyncio.Task[None]]) -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
