"""What is in a queue and is no message at all is dropped, where kombu 5.7.0 would end the worker.

A message whose parts are wrong is refused by Celery, and one whose body is wrong by our tasks.
"""

from __future__ import annotations

import logging
from typing import Any

from celery import bootsteps

from draftfleet.logs import event
from draftfleet.wire import LONGEST_SHOWN

log = logging.getLogger(__name__)

WRONG = (ValueError, TypeError, KeyError, AttributeError, RecursionError)
"""What Celery and kombu raise on an entry that is not JSON, not UTF-8, nested too deep, or of another shape."""


class DropGarbage(bootsteps.StartStopStep):
    """A step of Celery's consumer. `make_app` adds it to every app."""

    requires = ("celery.worker.consumer.tasks:Tasks",)

    def start(self, parent: Any) -> None:
        """After each connection: the channel is a new one."""
        _drop(parent.task_consumer.channel)


class _NoMessage(Exception):
    """An entry of the queue that is JSON, and no message."""


def _drop(channel: Any) -> None:
    read, message_class = channel.handlers["BRPOP"], channel.Message

    class Message(message_class):
        def __init__(self, payload: Any, channel: Any = None, **options: Any) -> None:
            try:
                super().__init__(payload, channel=channel, **options)
            except WRONG as error:
                raise _NoMessage(repr(error)) from error
            if self.content_type != "application/json":  # Celery hands raw bytes to code that expects JSON
                raise _NoMessage(f"its content is {self.content_type!r}")

    def read_message() -> bool:
        try:
            return bool(read())
        except (*WRONG, _NoMessage) as error:
            said = f"an entry of the queue is no message of Celery: {str(error)[:LONGEST_SHOWN]}"
            log.error(event("message dropped", reason=said))
            return True

    channel.handlers["BRPOP"], channel.Message = read_message, Message
