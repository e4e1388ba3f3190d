"""The event loop in a thread of its own, and chores in theirs."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import redis
from kombu.exceptions import OperationalError

from draftfleet.errors import DraftfleetError, QueueError
from draftfleet.logs import event

log = logging.getLogger(__name__)
T = TypeVar("T")


class Loop:
    """One asyncio loop per process. Everything about requests happens in it; other threads call in."""

    def __init__(self) -> None:
        self.asyncio = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._main, name="event-loop", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """Run it in the loop and wait for its result. Raises TimeoutError."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.asyncio).result(timeout_s)

    def call(self, action: Callable[..., object], *args: object) -> None:
        """Call it in the loop, soon; do not wait."""
        self.asyncio.call_soon_threadsafe(action, *args)

    def stop(self) -> None:
        """Cancel what runs, then end the loop and its thread."""
        if not self._thread.is_alive():
            return
        self.run(_cancel_all(), timeout_s=10)
        self.call(self.asyncio.stop)
        self._thread.join(10)

    def _main(self) -> None:
        asyncio.set_event_loop(self.asyncio)
        self.asyncio.run_forever()
        self.asyncio.close()


async def _cancel_all() -> None:
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


class Chore(threading.Thread):
    """Does the same thing every `interval_s` seconds until it is stopped, the first time after that or `at_once`.

    A chore never ends by an error: the next turn tries again. Redis being away is said once, and once more when it is
    back. An action returns False if it had nothing to ask Redis. `on_turn` is told its name after each turn.
    """

    def __init__(
        self,
        name: str,
        interval_s: float,
        action: Callable[[], object],
        *,
        at_once: bool = False,
        on_turn: Callable[[str], object] | None = None,
    ) -> None:
        super().__init__(name=name, daemon=True)
        self._interval_s = interval_s
        self._action = action
        self._at_once = at_once
        self._on_turn = on_turn
        self._stopped = threading.Event()
        self._redis_away = False

    def run(self) -> None:
        if self._at_once:
            self._turn()
        while not self._stopped.wait(self._interval_s):
            self._turn()

    def _turn(self) -> None:
        try:
            asked = self._action() is not False
        except (redis.RedisError, QueueError, OperationalError) as error:
            if not self._redis_away:
                log.warning(event("redis out of reach", chore=self.name, error=str(error)))
            self._redis_away = True
        except DraftfleetError as error:  # as a storage that is still away when the worker is told to stop
            log.error(event("chore failed", chore=self.name, error=str(error)))
        except Exception:
            log.exception(event("chore failed", chore=self.name))
        else:
            if self._redis_away and asked:
                log.info(event("redis reached again", chore=self.name))
                self._redis_away = False
        if self._on_turn is not None:
            self._on_turn(self.name)

    def stop(self) -> None:
        self._stopped.set()
