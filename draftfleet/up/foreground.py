"""`draftfleet up`: the processes as one, until a signal."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path

from draftfleet.logs import event
from draftfleet.news import News
from draftfleet.settings import Settings
from draftfleet.up.stack import Stack
from draftfleet.up.stopping import Stopping

log = logging.getLogger(__name__)

LOOK_S = 1.0


def up(settings: Settings, *, in_background: bool = False) -> int:
    """Run the stack until a signal. Returns an exit code; raises ChildEnded if a part ends by itself.

    In the background what there is to say goes to the log, without the login of Flower, and a terminal that closes is
    nothing to it.
    """
    tell = _log if in_background else _print
    with (
        Stopping(ignores_hangup=in_background) as stopping,
        Stack(settings, Path(settings.queue.embedded_dir) / "logs") as stack,
    ):
        stopping.hurry = stack.hurry
        if not in_background:
            _introduce(stack)
        try:
            _watch(stack, tell)
        except KeyboardInterrupt:
            tell(f"draining: {in_flight(stack)} (a second signal puts them aside at once)")
    return 0


def in_flight(stack: Stack) -> str:
    """`12 requests in flight may take another 60 s`"""
    count = sum(report.rows_in_flight for report in stack.reports())
    return f"{count:,} requests in flight may take another {stack.settings.worker.drain_s:g} s"


def introduction(flower_url: str, flower_login: str, logs: str, servers: list[str]) -> list[str]:
    """What a person needs to know of a fleet that was started."""
    return [
        f"Flower  {flower_url}  login {flower_login}",
        f"Logs    {logs}/",
        f"Servers {', '.join(servers) or 'none named: no worker was started (--servers URL,...)'}",
    ]


def _introduce(stack: Stack) -> None:
    lines = introduction(stack.flower_url, stack.flower_login, str(stack.logs), stack.settings.worker.servers)
    lines += ["Ctrl-C drains and stops everything.", "Next    draftfleet produce DATA, draftfleet status --watch"]
    print("\n".join(lines), file=sys.stderr)


def _watch(stack: Stack, tell: Callable[[str], None]) -> None:
    news, is_ready = News(), False
    while True:
        stack.check()
        if not is_ready and not stack.waiting_for():
            is_ready = True
            stack.hold.note(state="ready")
        for line in news.of(stack.reports()):
            tell(line)
        time.sleep(LOOK_S)


def _print(line: str) -> None:
    print(time.strftime("%H:%M:%S"), line, file=sys.stderr, flush=True)


def _log(line: str) -> None:
    log.info(event(line))
