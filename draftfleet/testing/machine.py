"""The imitated machine: its engine on the clock of the event loop, and how it crashes, loads, freezes and forgets."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from draftfleet.testing.behaviour import Behaviour, Fault
from draftfleet.testing.engine import Engine, Sequence
from draftfleet.testing.gauges import Readings

Fate = Literal["answered", "lost", "forgotten"]
"""Of a request: answered in the end, lost in a crash, or forgotten: neither answered nor refused."""


class Lag:
    """How much later than modelled answers were written, in real seconds."""

    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=100_000)
        self.max_s = 0.0
        self.count = 0

    def add(self, seconds: float) -> None:
        self._last.append(seconds)
        self.max_s = max(self.max_s, seconds)
        self.count += 1

    def summary(self) -> dict[str, float]:
        """Mean and p99 are those of the last 100,000 answers."""
        ordered = sorted(self._last) or [0.0]
        p99 = ordered[min(int(0.99 * len(ordered)), len(ordered) - 1)]
        return {"mean": fmean(ordered), "p99": p99, "max": self.max_s, "answers": self.count}


@dataclass(frozen=True, slots=True)
class Totals:
    """Most sequences ever at work at once, and what was counted since the server was made."""

    peak: int = 0
    preemptions: int = 0
    generated_tokens: int = 0


class Machine:
    """Lives in one event loop. `behaviour` is changed through `change` alone."""

    def __init__(self, behaviour: Behaviour) -> None:
        self.behaviour = behaviour
        self.lag = Lag()
        self.crashes = 0
        self._loop = asyncio.get_running_loop()
        self._engine = Engine(behaviour, self._loop.time())
        self._at_work: dict[Sequence, asyncio.Future[Fate]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._next_state: asyncio.TimerHandle | None = None
        self._thaw: asyncio.TimerHandle | None = None
        self._is_loading = False
        self._changed = asyncio.Event()
        self._pardons = 0
        self._before = Totals()
        self._load()

    @property
    def is_ready(self) -> bool:
        return self.behaviour.ready and not self._is_loading

    def readings(self) -> Readings:
        self._pass_time()
        engine = self._engine
        return Readings(engine.running, engine.waiting, engine.kv_usage, engine.preemptions, int(engine.generated))

    def totals(self) -> Totals:
        """Over all its lives; `readings` are those of this one."""
        self._pass_time()
        engine, before = self._engine, self._before
        return Totals(
            peak=max(before.peak, engine.peak),
            preemptions=before.preemptions + engine.preemptions,
            generated_tokens=before.generated_tokens + int(engine.generated),
        )

    async def work(self, sequence: Sequence) -> Fate:
        """Returns when the sequence has ended, at `sequence.ended_at`. Takes it out when the client goes away."""
        fate: asyncio.Future[Fate] = self._loop.create_future()
        self._at_work[sequence] = fate
        self._settle(self._engine.add(sequence, self._loop.time()))
        try:
            return await fate
        finally:
            if self._at_work.pop(sequence, None) is not None:
                self._settle(self._engine.remove(sequence, self._loop.time()))

    def made(self, sequence: Sequence) -> int:
        """Tokens that a sequence at work has made by now."""
        self._pass_time()
        return int(self._engine.made(sequence))

    def change(self, behaviour: Behaviour) -> None:
        before, self.behaviour = self.behaviour, behaviour
        if before.alive and not behaviour.alive:
            self._crash()
        elif behaviour.alive and not before.alive:
            self._start()
        elif self._is_loading and not behaviour.load_s:
            self._loaded()
        self._repace()

    def pardon(self) -> None:
        """Faults were taken back: requests that are kept waiting by one are dropped."""
        self._pardons += 1
        self._wake()

    async def never(self, fault: Fault | None = None) -> None:
        """Returns when there is nobody left to answer: after a crash, or when the fault is taken back."""
        crashes, pardons = self.crashes, self._pardons
        while self.crashes == crashes and (self._pardons == pardons or (fault and self._orders(fault))):
            await self._changed.wait()

    def strike(self, fault: Fault) -> None:
        """One of OF_THE_SERVER."""
        self._pass_time()
        match fault.kind:
            case "stall":
                self.behaviour.frozen = True
                if fault.for_s is not None:
                    self._cancel(self._thaw)
                    self._thaw = self._later(fault.for_s, self._unfreeze)
            case "ghost":
                self._let_go(self._engine.clear(), "forgotten")
            case "die" | "other_model":
                if fault.kind == "other_model":
                    self.behaviour.model = "other"
                if fault.kind == "die" or fault.restart_s is not None:
                    self._die(fault.restart_s)
            case _:
                pass
        self._repace()

    # -- dying and coming back

    def _die(self, restart_s: float | None) -> None:
        self.behaviour.alive = False
        self._crash()
        if restart_s is not None:
            self._next_state = self._later(restart_s, self._rise)

    def _crash(self) -> None:
        """All that was in flight is lost; counters begin at zero again, as those of a new process do."""
        self.crashes += 1
        self._cancel(self._next_state)
        self._before = self.totals()
        lost = self._engine.clear()
        self._engine = Engine(self.behaviour, self._loop.time())
        self._let_go(lost, "lost")

    def _rise(self) -> None:
        self.behaviour.alive = True
        self._start()
        self._repace()

    def _start(self) -> None:
        self._cancel(self._next_state)
        self._cancel(self._thaw)
        self.behaviour.frozen = False
        self._load()

    def _load(self) -> None:
        self._is_loading = bool(self.behaviour.load_s)
        if self._is_loading:
            self._next_state = self._later(self.behaviour.load_s, self._loaded)

    def _loaded(self) -> None:
        self._is_loading = False

    def _unfreeze(self) -> None:
        self._pass_time()
        self.behaviour.frozen = False
        self._repace()

    # -- time

    def _later(self, model_s: float, call: Callable[[], None]) -> asyncio.TimerHandle:
        return self._loop.call_later(model_s / self.behaviour.time_scale, call)

    @staticmethod
    def _cancel(timer: asyncio.TimerHandle | None) -> None:
        if timer is not None:
            timer.cancel()

    def _repace(self) -> None:
        self._settle(self._engine.change(self.behaviour, self._loop.time()))
        self._wake()

    def _settle(self, ended: list[Sequence]) -> None:
        """Tell those who ended, and look again at the next moment at which somebody does."""
        self._let_go(ended, "answered")
        at = self._engine.next_at()
        if self._timer is not None and (at is None or at < self._timer.when()):
            self._timer.cancel()
            self._timer = None
        if at is not None and self._timer is None:  # one that is too early finds nothing, and is set anew
            self._timer = self._loop.call_at(at, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._pass_time()

    def _pass_time(self) -> None:
        """Until now, at the pace so far. The engine reads `behaviour` itself: call this before it is changed."""
        self._settle(self._engine.advance(self._loop.time()))

    def _let_go(self, sequences: list[Sequence], fate: Fate) -> None:
        for sequence in sequences:
            waiter = self._at_work.pop(sequence)
            if not waiter.done():
                waiter.set_result(fate)

    def _orders(self, fault: Fault) -> bool:
        return any(one.kind == fault.kind and one.contains == fault.contains for one in self.behaviour.faults)

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
