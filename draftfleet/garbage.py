"""What is in a queue and is no message at all is dropped, where kombu 5.7.0 would end the worker.

A message whose parts are wrong is refused by Celery, and one whose body is wrong by our tasks.
"""

from __future__ import annotations

import logging
from json import JSONDecodeError
from typing import Any

from celery import bootsteps

from draftfleet.logs import event

log = logging.getLogger(__name__)


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
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                raise _NoMessage(repr(error)) from error

    def read_message() -> bool:
        try:
            return bool(read())
        except (JSONDecodeError, UnicodeDecodeError, _NoMessage) as error:
            log.error(event("message dropped", reason=f"an entry of the queue is no message of Celery: {error}"))
            return True

    channel.handlers["BRPOP"], channel.Message = read_message, Message
