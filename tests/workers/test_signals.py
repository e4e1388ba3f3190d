"""Signals that come early."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

from workers.signals import Signals


def test_a_reload_that_is_asked_for_before_there_is_a_node_is_done_once_there_is_one(
    until: Callable[..., Any],
) -> None:
    reloaded, stopped = threading.Event(), threading.Event()
    with Signals() as told:
        os.kill(os.getpid(), signal.SIGHUP)
        until(lambda: told.waits_to_reload, what="the signal seen")

        told.listen(stopped.set, reloaded.set)

        assert reloaded.wait(30)
        reloaded.clear()
        os.kill(os.getpid(), signal.SIGHUP)
        assert reloaded.wait(30)
    assert not stopped.is_set()
