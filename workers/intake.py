"""The gate before the queue: a message is taken only when the node wants a batch.

Celery asks its broker channel before each BRPOP whether it may take a message (`qos.can_consume`); the gate answers in
its place. A BRPOP that is already out is let come in: a message that Redis has handed over would otherwise lie in a
socket, seen by nobody.
"""

from __future__ import annotations

import logging
import os
import threading
from typing import Any

from celery import bootsteps
from celery.worker import state as worker_state

from draftfleet.logs import event
from draftfleet.settings.sections import WARM_END_S
from workers.node import Node

log = logging.getLogger(__name__)

TICK_S = 0.1
"""How often the consumer looks at the gate, and whether the node has drained."""


def gate(node: Node) -> type[bootsteps.StartStopStep]:
    """A consumer step for this node."""

    class Gate(bootsteps.StartStopStep):
        requires = ("celery.worker.consumer.tasks:Tasks",)

        def start(self, parent: Any) -> None:
            """After each connection: the channel is a new one."""
            channel = parent.task_consumer.channel
            _let_in(channel, node)
            _acknowledge_calmly(channel, parent.connection_errors)
            # Claims tell who is at work. What kombu would put back when a connection breaks is still worked on here;
            # and with Redis away, its attempt ends the worker (kombu 5.7.0: AttributeError in QoS.restore_unacked).
            channel.do_restore = False

        def register_with_event_loop(self, parent: Any, hub: Any) -> None:
            hub.timer.call_repeatedly(TICK_S, _end_if_drained, (node,))

    return Gate


def _let_in(channel: Any, node: Node) -> None:
    may_take = channel.qos.can_consume

    def can_consume() -> bool:
        if not may_take():
            return False
        is_brpop_out = bool(getattr(channel, "_in_poll", None))
        return is_brpop_out or node.wants_batch(len(worker_state.reserved_requests))

    channel.qos.can_consume = can_consume


def _acknowledge_calmly(channel: Any, connection_errors: tuple[type[Exception], ...]) -> None:
    """A message whose connection is gone cannot be acknowledged. It comes again, and is found to be done.

    Celery would log a traceback for each, and end at the AttributeError of a channel that was closed (kombu 5.7.0).
    """
    basic_ack = channel.basic_ack

    def acknowledge(delivery_tag: str, multiple: bool = False) -> None:
        try:
            basic_ack(delivery_tag, multiple=multiple)
        except (*connection_errors, AttributeError) as error:
            log.info(event("message not acknowledged", reason=f"its connection to Redis is gone: {error}"))

    channel.basic_ack = acknowledge


def _end_if_drained(node: Node) -> None:
    """Runs in Celery's own loop, so the acknowledgements of the last tasks are written before it ends."""
    if node.drained.is_set() and not worker_state.active_requests:
        worker_state.should_stop = 0


def end_when_drained(node: Node, ended: threading.Event) -> None:
    """End Celery where its loop does not turn, as while it waits for a Redis that is away; else the process.

    All that was finished is saved by then, and all claims are released.
    """

    def wait() -> None:
        node.drained.wait()
        if ended.wait(10 * TICK_S):
            return
        worker_state.should_stop = 0
        if not ended.wait(WARM_END_S):
            log.error(event("worker ended hard", reason=f"celery did not end within {WARM_END_S:g} s"))
            os._exit(node.error.exit_code if node.error else 0)

    threading.Thread(target=wait, name="end-when-drained", daemon=True).start()
