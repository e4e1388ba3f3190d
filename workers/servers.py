"""The local inference servers: which are ready, and who gets the next row. Lives in the event loop."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence

from draftfleet.errors import Mismatch, NotReady, ServerError
from draftfleet.live import ServerState
from draftfleet.logs import event
from draftfleet.settings import Worker
from workers import dialects, gauges
from workers.addresses import Address
from workers.client import Client, Look, Unreachable
from workers.concurrency import Concurrency
from workers.dialects.openai import context_tokens, model_entries
from workers.server import Server
from workers.watch import Patience

__all__ = ["Server", "Servers"]

log = logging.getLogger(__name__)

SAY_AGAIN_S = 30.0
SAY_LATE_AGAIN_S = 600.0
CACHED = 0.8
"""How much work counts at the server that has the beginning of the conversation in its cache."""

ABSENT_LOOKS = 3
"""Where nothing listens, every third look is enough."""


async def _nothing(server: Server, most: int | None) -> int:
    return 0


class Servers:
    """The list, which may change while running. `on_change` is called whenever a slot may have become free.

    `recall` takes back what a server holds, the youngest first, `most` of them or all; returns how many rows.
    """

    def __init__(self, client: Client, knobs: Worker, model: str) -> None:
        self.model = model
        self.all: dict[str, Server] = {}
        self.on_change: Callable[[], object] = lambda: None
        self.recall: Callable[[Server, int | None], Awaitable[int]] = _nothing
        self._client = client
        self._knobs = knobs
        self._watches: dict[str, asyncio.Task[None]] = {}
        self._looks: dict[str, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()

    @property
    def ready(self) -> list[Server]:
        return [server for server in list(self.all.values()) if server.state == "ready"]

    @property
    def present(self) -> list[Server]:
        """Without the ports of ranges at which nothing listens."""
        return [server for server in list(self.all.values()) if server.state != "absent"]

    def set(self, addresses: Iterable[Address], knobs: Worker) -> None:
        """Let these be the servers. A removed one gets nothing new; what it is at work on may finish."""
        self._knobs = knobs
        self._client.set(knobs)
        wanted = {address.url: address for address in addresses}
        for url in self.all.keys() - wanted.keys():
            self._watches.pop(url).cancel()
            was, self.all[url].state = self.all[url].state, "away"
            if was != "absent":
                log.info(event("server removed", server=url))
            del self.all[url]
        for url, address in wanted.items():
            most, pinned = knobs.max_concurrency, knobs.concurrency
            if url not in self.all:
                self.all[url] = Server(url, Concurrency(start=knobs.start_concurrency, most=most, pinned=pinned))
                self.all[url].state = "waiting" if address.is_named else "absent"
                self._watches[url] = asyncio.create_task(self._watch(self.all[url]))
            server = self.all[url]
            server.is_named = address.is_named
            server.changed(server.concurrency.configure(time.monotonic(), most=most, pinned=pinned))
        self._notify()

    @property
    def num_free(self) -> int:
        """Slots that rows may take as soon as they come, those of servers that their canary still keeps included."""
        return sum(max(0, server.limit - server.in_flight) for server in self.ready if not server.held_s)

    def pick(self, run_id: str, *, avoid: str = "", prefer: str = "", alone: bool = False) -> Server | None:
        """The server with the least outstanding work: requests in flight by measured seconds per token.

        `avoid` is taken only if no other has a free slot, `prefer` also if it has a little more to do.
        """
        free = [server for server in self.all.values() if server.can_take(run_id, alone=alone)]
        known = [server.seconds_per_token for server in free if server.seconds_per_token is not None]
        usual = sum(known) / len(known) if known else 1.0

        def outstanding(server: Server) -> tuple[bool, float, int]:
            work = (server.in_flight + 1) * (server.seconds_per_token or usual)
            return server.url == avoid, work * (CACHED if server.url == prefer else 1), server.rows

        return min(free, key=outstanding, default=None)

    async def confirm(self, server: Server) -> bool:
        """Look at a server whose answer broke off: is it still there?"""
        await self._look(server)
        if server.failures and server.state == "ready":
            await asyncio.sleep(1)
            await self._look(server)
        return server.state == "ready"

    def broke(self, server: Server, fault: ServerError) -> None:
        """An answer broke off though the server is there: after too many in a row it rests, and others take over."""
        if server.broke():
            self._rest(server, f"too many answers in a row broke off, the last: {fault.summary}")

    def failed_trial(self, server: Server, fault: ServerError) -> None:
        """A canary broke off. One that is to show that the server is well again sends it back to rest."""
        if server.rests and not server.rest_s:
            self._rest(server, f"it is not well yet: {fault.summary}")

    async def wait_ready(self, budget_s: float) -> None:
        """Until one is ready. Raises Mismatch if they do not serve one model, NotReady once the budget is spent.

        One that never gets ready holds up none of the others.
        """
        deadline = time.monotonic() + budget_s
        while True:
            looked = all(server.failures or server.models for server in self.all.values())
            if looked:  # at all of them, so that the error names what each serves
                self._raise_mismatch()
                if self.ready:
                    return
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise NotReady(self._not_ready(budget_s))
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), min(left_s, 1.0))
            except TimeoutError:
                continue

    async def _watch(self, server: Server) -> None:
        while True:
            try:
                await self._look(server)
                await self._tend(server)
                self._remind(server)
            except Exception:  # a server that nobody looks at would stay as it was for ever
                log.exception(event("server not looked at", server=server.url))
            looks = ABSENT_LOOKS if server.state == "absent" else 1
            await asyncio.sleep(self._knobs.probe_interval_s * looks)

    async def _tend(self, server: Server) -> None:
        """Take back what it does not work on, and let its limit follow its load."""
        why = server.watch.look(
            time.monotonic(),
            held=server.in_flight + server.trials,
            ended=server.ended,
            gauges=server.gauges,
            is_heard=not server.failures,
            patience=Patience(self._knobs.stall_s, self._knobs.ghost_s),
        )
        if why:
            self._rest(server, why)
            rows = await self.recall(server, None)
            log.warning(event("server stalled", server=server.url, reason=why, rows_taken_back=rows))
        elif server.state == "ready" and not server.failures:
            if most := server.look():
                await self.recall(server, most)
            self._notify()

    def _rest(self, server: Server, reason: str) -> None:
        rest_s = server.rest()
        if server.state == "ready":
            self._set_state(server, "resting", f"{reason}; asked again in {rest_s:.0f} s")

    def _remind(self, server: Server) -> None:
        """Say again what is not as it should be; of a port of a range nothing is expected."""
        if server.state == "ready" or not server.is_named:
            return
        waited_s = time.monotonic() - server.since
        if not server.was_ready and not server.is_late and waited_s >= self._knobs.ready_timeout_s:
            server.is_late = True
            log.error(event("server did not get ready", server=server.url, seconds=waited_s, reason=server.reason))
        if time.monotonic() - server.said >= (SAY_LATE_AGAIN_S if server.is_late else SAY_AGAIN_S):
            self._say(server)

    async def _look(self, server: Server) -> None:
        """One look at a time per server: rows that broke off together share it."""
        task = self._looks.get(server.url)
        if task is None:
            task = self._looks[server.url] = asyncio.create_task(self._look_once(server))
            task.add_done_callback(lambda _: self._looks.pop(server.url, None))
        await asyncio.shield(task)

    async def _look_once(self, server: Server) -> None:
        try:
            look = await self._client.look(server.url, is_new=server.state != "ready")
        except Unreachable as error:
            server.failures += 1
            server.refused = error.refused
            if not server.is_named and error.refused and server.state in ("absent", "waiting"):
                self._set_state(server, "absent", "nothing listens there")
            # A busy server may answer one look late; one that refuses the connection is gone.
            elif server.state not in ("ready", "resting") or error.refused or server.failures > 1:
                is_new = server.state in ("waiting", "absent")
                self._set_state(server, "waiting" if is_new else "away", str(error))
            return
        server.failures = 0
        server.gauges = gauges.read(look.metrics)
        self._seen(server, look)

    def _seen(self, server: Server, look: Look) -> None:
        server.models = look.models
        serves = server.serves
        if not serves:
            self._set_state(server, "waiting", "it lists no model yet")
            return
        self.model = self.model or serves[0]
        if self.model not in serves:
            self._set_state(server, "mismatched", f"it serves {', '.join(serves)}, not {self.model}")
            return
        if server.rest_s:
            if server.state != "resting":
                self._set_state(server, "resting", f"asked again in {server.rest_s:.0f} s")
            return
        entry = next(entry for entry in model_entries(look.models) if entry["id"] == self.model)
        server.context_tokens = context_tokens(entry)
        if server.state != "ready":
            name = self._knobs.dialect
            if name == "auto":
                name = dialects.detect(look.models, look.metrics, look.headers, look.greeting) or "openai"
                if name in dialects.UNSUITABLE:
                    self._set_state(server, "mismatched", dialects.UNSUITABLE[name])
                    return
            server.dialect = dialects.load(name)
            server.cleared.clear()
            server.was_ready, server.is_late = True, False
        self._set_state(server, "ready", "")

    def _set_state(self, server: Server, state: ServerState, reason: str) -> None:
        changed = server.state != state
        server.state, server.reason = state, reason
        if changed and state != "absent":
            self._say(server)
        self._notify()

    def _say(self, server: Server) -> None:
        server.said = time.monotonic()
        if server.state == "ready":
            log.info(
                event(
                    "server ready",
                    server=server.url,
                    model=self.model,
                    dialect=server.dialect.NAME,
                    context_tokens=server.context_tokens,
                    limit=server.limit,
                    limit_is="pinned" if server.concurrency.pinned else "adaptive",
                )
            )
        elif server.state == "mismatched":
            log.error(event("server left out", server=server.url, reason=server.reason))
        elif server.state == "resting":
            log.warning(event("server rests", server=server.url, reason=server.reason))
        else:
            log.warning(event("waiting for server", server=server.url, state=server.state, reason=server.reason))

    def _notify(self) -> None:
        self._changed.set()
        self.on_change()

    def _raise_mismatch(self) -> None:
        servers = list(self.all.values())
        for server in servers:
            if server.state == "mismatched" and server.is_named and self.model in server.serves:
                raise Mismatch(f"server {server.url} is left out: {server.reason}.")
        if any(server.state == "mismatched" and server.is_named for server in servers):
            raise Mismatch(
                f"this worker asks for model {self.model}, and not all of its servers serve it:\n{_listing(servers)}\n"
                "All servers of one worker must serve the same model: set target.model to the name they serve, "
                "or start one worker per model."
            )

    def _not_ready(self, budget_s: float) -> str:
        return (
            f"no server got ready within worker.ready_timeout_s = {budget_s:g} s:\n"
            + "\n".join(f"  {server.url}: {server.reason}" for server in self.all.values())
            + "\nStart them, correct worker.servers, or give large models more time."
        )


def _listing(servers: Sequence[Server]) -> str:
    lines = [f"  {server.url} serves {', '.join(server.serves)}" for server in servers if server.models]
    lines += [f"  {server.url} does not answer yet: {server.reason}" for server in servers if not server.models]
    return "\n".join(lines)
