"""A fake inference server that can do everything wrong, for tests and benchmarks of whatever asks one.

    with FakeServer(shape="vllm", model="target") as server:          # in a thread of this process
        server.fault("status", status=503, times=3)                   # what comes next, while it runs
        ...
        assert server.stats()["requests"] == 12

    with FakeProcess(shape="transformers") as server:                 # a process of its own, that can be killed
        server.kill()

    draftfleet fake-server --servers 7 --port 9000                    # the same by hand

Answers depend on the prompt alone, so rows that were asked twice can be compared.
"""

from __future__ import annotations

from draftfleet.testing.behaviour import Behaviour, Fault
from draftfleet.testing.running import FakeProcess, FakeServer, Remote

__all__ = ["Behaviour", "FakeProcess", "FakeServer", "Fault", "Remote"]
