"""Fixtures of the fault suite: settings under which a fault is noticed within seconds, and a network that fails."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from draftfleet.embedded import Embedded
from draftfleet.settings import Settings
from draftfleet.storage import FileStorage
from draftfleet.testing.proxy import Proxy
from draftfleet.testing.workers import changed


@pytest.fixture
def quick(settings: Settings) -> Settings:
    """Claims that lapse soon; and no patience that a test's own waiting could exhaust."""
    return changed(
        settings,
        claims__ttl_s=1.5,
        claims__renew_s=0.3,
        claims__sweep_s=0.3,
        claims__reconcile_s=1,
        claims__grace_s=1,
        worker__checkpoint_interval_s=0.3,
        worker__probe_interval_s=0.2,
        worker__stall_s=600,
        worker__ghost_s=600,
    )


@pytest.fixture
def proxy(redis_server: Embedded) -> Iterator[Proxy]:
    """Between Redis and whoever is given its `url`."""
    with Proxy(redis_server.url) as proxy:
        yield proxy


class FaultyStorage:
    """A worker that is started through `wrapper` cannot do a call on the storage while it is ordered to fail."""

    def __init__(self, folder: Path, storage: FileStorage) -> None:
        folder.mkdir()
        self._folder = folder
        script = Path(__file__).with_name("on_faulty_storage.py")
        self.wrapper = (sys.executable, str(script), str(folder), str(storage.root))

    def fail(self, call: str) -> None:
        """`open`, `os.link` (a shard is committed) or `os.rename` (finished rows are saved)."""
        (self._folder / call).touch()

    def mend(self) -> None:
        for order in self._folder.iterdir():
            order.unlink()


@pytest.fixture
def faulty_storage(tmp_path: Path, storage: FileStorage) -> FaultyStorage:
    return FaultyStorage(tmp_path / "storage-faults", storage)
