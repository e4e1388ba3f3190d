"""What changed between two looks at the workers, as lines for a terminal: whoever starts servers is told of them."""

from __future__ import annotations

from collections.abc import Iterable

from draftfleet.live import WorkerReport


class News:
    """Remembers what was said, so that each change is said once."""

    def __init__(self) -> None:
        self._said: dict[str, str] = {}

    def of(self, reports: Iterable[WorkerReport]) -> list[str]:
        """`server http://127.0.0.1:8000 is away: connection refused`, and the like, for all that changed."""
        now: dict[str, str] = {}
        for report in reports:
            now[f"worker on {report.host}"] = _shown(report.state, report.reason)
            for server in report.servers:
                now[f"server {server.url}"] = _shown(server.state, server.reason)
        lines = [f"{name} is {text}" for name, text in now.items() if self._said.get(name) != text]
        self._said |= now
        return lines

    def changed(self, name: str, state: str, reason: str = "") -> str:
        """The line about one more thing; empty where nothing changed since it was last looked at."""
        text, before = _shown(state, reason), self._said.get(name)
        self._said[name] = text
        return f"{name} is {text}" if before not in (None, text) else ""


def _shown(state: str, reason: str) -> str:
    return f"{state}: {reason}" if reason else state
