"""The local inference servers: which are ready, what they serve, how much each gets. Lives in the event loop."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from draftfleet.errors import Mismatch, NotReady
from draftfleet.live import ServerState
from draftfleet.logs import event
from draftfleet.settings import Worker
from workers import dialects
from workers.client import Client, Look, Unreachable
from workers.dialects import Dialect
from workers.dialects.openai import model_entries

log = logging.getLogger(__name__)

SAY_AGAIN_S = 30.0
LONGEST_HOLD_S = 60.0
SPEED_MEMORY = 0.05
"""Weight of the newest answer in a server's measured speed."""


@dataclass(slots=True, eq=False)
class Server:
    """One of them. `limit` may be set at any time; `slots` is what it may have now, fewer after an overload.

    `cleared` names the runs whose canary it has passed since it was last seen to come up. While it `is_kept` for one
    row, it gets no other.
    """

    url: str
    limit: int
    state: ServerState = "waiting"
    reason: str = "not looked at yet"
    dialect: Dialect = field(default_factory=lambda: dialects.load("openai"))
    models: dict[str, Any] = field(default_factory=dict[str, Any])
    context_tokens: int | None = None
    in_flight: int = 0
    suspects: int = 0
    is_kept: bool = False
    rows: int = 0
    tokens: int = 0
    seconds_per_token: float | None = None
    cleared: set[str] = field(default_factory=set[str])
    refused: bool = False
    failures: int = 0
    said: float = 0.0
    _reduced: float | None = None
    _overloads: int = 0
    _held_until: float = 0.0

    @property
    def slots(self) -> int:
        return self.limit if self._reduced is None else max(1, min(self.limit, int(self._reduced)))

    @property
    def serves(self) -> list[str]:
        return [str(entry["id"]) for entry in model_entries(self.models)]

    @property
    def held_s(self) -> float:
        """Seconds for which it asked to get nothing new."""
        return max(0.0, self._held_until - time.monotonic())

    def can_take(self, run_id: str, *, alone: bool) -> bool:
        """Whether a slot is free for a row of this run; for a suspect (`alone`), only if it holds no other suspect."""
        return (
            self.state == "ready"
            and run_id in self.cleared
            and self.in_flight < self.slots
            and not (alone and self.suspects)
            and not self.is_kept
            and not self.held_s
        )

    def completed(self, tokens: int, seconds: float) -> None:
        self.rows += 1
        self.tokens += tokens
        self._overloads = 0
        if self._reduced is not None:
            self._reduced += 1 / self._reduced
            if self._reduced >= self.limit:
                self._reduced = None
        if tokens > 0:
            measured = seconds / tokens
            known = self.seconds_per_token
            self.seconds_per_token = measured if known is None else known + SPEED_MEMORY * (measured - known)

    def overloaded(self, retry_after_s: float | None) -> float:
        """It answered 429 or 503: a quarter fewer slots, and nothing new for a while. Returns for how many seconds.

        The slots grow back by one for each round of answers. A burst of refusals counts once.
        """
        if not self.held_s:
            self._reduced = max(1.0, 0.75 * min(self.slots, self.in_flight + 1))
            hold_s = min(LONGEST_HOLD_S, 0.5 * 2**self._overloads) * random.uniform(0.5, 1.0)
            self._overloads += 1
            self._held_until = time.monotonic() + hold_s
        if retry_after_s is not None:
            self._held_until = max(self._held_until, time.monotonic() + min(retry_after_s, 10 * LONGEST_HOLD_S))
        return self.held_s


class Servers:
    """The list, which may change while running. `on_change` is called whenever a slot may have become free."""

    def __init__(self, client: Client, knobs: Worker, model: str) -> None:
        self.model = model
        self.all: dict[str, Server] = {}
        self.on_change: Callable[[], object] = lambda: None
        self._client = client
        self._knobs = knobs
        self._watches: dict[str, asyncio.Task[None]] = {}
        self._looks: dict[str, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()

    @property
    def ready(self) -> list[Server]:
        return [server for server in list(self.all.values()) if server.state == "ready"]

    def set(self, urls: Iterable[str], limit: int) -> None:
        """Let these be the servers. A removed one gets nothing new; what it is at work on may finish."""
        wanted = list(dict.fromkeys(urls))
        for url in self.all.keys() - set(wanted):
            self._watches.pop(url).cancel()
            self.all.pop(url).state = "away"
            log.info(event("server removed", server=url))
        for url in wanted:
            if url not in self.all:
                self.all[url] = Server(url, limit)
                self._watches[url] = asyncio.create_task(self._watch(self.all[url]))
            self.all[url].limit = limit
        self._notify()

    def pick(self, run_id: str, *, avoid: str = "", alone: bool = False) -> Server | None:
        """The server with the least outstanding work: requests in flight by measured seconds per token.

        `avoid` is taken only if no other has a free slot.
        """
        free = [server for server in self.all.values() if server.can_take(run_id, alone=alone)]
        known = [server.seconds_per_token for server in free if server.seconds_per_token is not None]
        usual = sum(known) / len(known) if known else 1.0

        def outstanding(server: Server) -> tuple[bool, float, int]:
            return server.url == avoid, (server.in_flight + 1) * (server.seconds_per_token or usual), server.rows

        return min(free, key=outstanding, default=None)

    async def confirm(self, server: Server) -> bool:
        """Look at a server whose answer broke off: is it still there?"""
        await self._look(server)
        if server.failures and server.state == "ready":
            await asyncio.sleep(1)
            await self._look(server)
        return server.state == "ready"

    async def wait_ready(self, budget_s: float) -> None:
        """Until one is ready. Raises Mismatch if they do not serve one model, NotReady once the budget is spent."""
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
            await self._look(server)
            if server.state != "ready" and time.monotonic() - server.said >= SAY_AGAIN_S:
                self._say(server)
            await asyncio.sleep(self._knobs.probe_interval_s)

    async def _look(self, server: Server) -> None:
        """One look at a time per server: rows that broke off together share it."""
        task = self._looks.get(server.url)
        if task is None:
            task = self._looks[server.url] = asyncio.create_task(self._look_once(server))
            task.add_done_callback(lambda _: self._looks.pop(server.url, None))
        await asyncio.shield(task)

    async def _look_once(self, server: Server) -> None:
        try:
            look = await self._client.look(server.url)
        except Unreachable as error:
            server.failures += 1
            server.refused = error.refused
            # A busy server may answer one look late; one that refuses the connection is gone.
            if server.state != "ready" or error.refused or server.failures > 1:
                self._set_state(server, "away" if server.state != "waiting" else "waiting", str(error))
            return
        server.failures = 0
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
        entry = next(entry for entry in model_entries(look.models) if entry["id"] == self.model)
        length = entry.get("max_model_len")
        server.context_tokens = length if isinstance(length, int) else None
        if server.state != "ready":
            name = self._knobs.dialect
            name = (dialects.detect(look.models, look.metrics, look.headers) or "openai") if name == "auto" else name
            server.dialect = dialects.load(name)
            server.cleared.clear()
        self._set_state(server, "ready", "")

    def _set_state(self, server: Server, state: ServerState, reason: str) -> None:
        changed = server.state != state
        server.state, server.reason = state, reason
        if changed:
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
                )
            )
        elif server.state == "mismatched":
            log.error(event("server left out", server=server.url, reason=server.reason))
        else:
            log.warning(event("waiting for server", server=server.url, state=server.state, reason=server.reason))

    def _notify(self) -> None:
        self._changed.set()
        self.on_change()

    def _raise_mismatch(self) -> None:
        servers = list(self.all.values())
        if any(server.state == "mismatched" for server in servers):
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
