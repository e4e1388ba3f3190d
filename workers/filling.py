"""How full servers are kept: the seconds of slots that they offered, and those of them that requests filled.

Limit and load are taken as they are at each look, for the time since the look before.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Protocol


class Slots(Protocol):
    """What is looked at of a server: its requests, and how many it may have."""

    @property
    def url(self) -> str: ...

    @property
    def limit(self) -> int: ...

    @property
    def in_flight(self) -> int: ...


class Filling:
    """`slot_s` and `busy_s` are seconds of slots by server, since the first look."""

    def __init__(self) -> None:
        self.slot_s: dict[str, float] = defaultdict(float)
        self.busy_s: dict[str, float] = defaultdict(float)
        self._offering: set[str] = set()
        self._last = 0.0

    def look(self, now: float, servers: Iterable[Slots]) -> None:
        """`servers` are those that are ready and for which there is work. One counts from its second look in a row."""
        offering: set[str] = set()
        for server in servers:
            offering.add(server.url)
            if server.url in self._offering:
                self.slot_s[server.url] += server.limit * (now - self._last)
                self.busy_s[server.url] += min(server.in_flight, server.limit) * (now - self._last)
        self._offering, self._last = offering, now
