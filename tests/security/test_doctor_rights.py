"""`draftfleet doctor` tells by trying whether a shipped user of Redis may do a worker's work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from draftfleet.queue import connect
from workers.doctor.acl import refused

As = Callable[..., Any]


@pytest.mark.parametrize("acl_redis", ["valkey", "redis"], indirect=True)
def test_the_worker_has_all_rights_of_a_worker_and_the_producer_lacks_some(acl_redis: As) -> None:
    worker, producer, admin = (connect(acl_redis(user)) for user in ("worker", "producer", "admin"))

    of_worker, of_producer = refused(worker), refused(producer)

    assert of_worker == []
    assert {"BRPOP generate.*", "HSET unacked*", "SUBSCRIBE celery.pidbox"} <= set(of_producer)
    assert list(admin.scan_iter("*doctor*")) == []
