"""Whether a process works is what it says of itself, and what it does not say."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from draftfleet import health
from draftfleet.embedded import Embedded
from draftfleet.errors import RunError, SettingsError
from draftfleet.health import Pulse
from draftfleet.settings import Settings
from draftfleet.testing import FakeServer
from draftfleet.testing.workers import WorkerProcess, changed

Until = Callable[..., Any]


@pytest.fixture(autouse=True)
def runtime_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "draftfleet"


@pytest.fixture
def quick() -> Pulse:
    return Pulse("worker", patience_s=0.2, beat_s=0.05)


def test_a_real_worker_is_healthy_until_it_is_frozen_or_gone(
    settings: Settings,
    tmp_path: Path,
    until: Until,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with FakeServer(model="tiny") as server:
        servers = changed(settings, worker__servers=[server.url])
        with WorkerProcess(servers, tmp_path / "worker.log") as worker:
            until(lambda: worker.said("worker started"), what="the worker")
            until(lambda: health.show("worker") == 0 and "working, 0 batches held" in capsys.readouterr().out)

            worker.send(signal.SIGSTOP)
            monkeypatch.setattr(health, "SILENT_S", 0.5)
            until(lambda: health.show("worker") == 1, what="the worker to fall silent")
            assert f"worker {worker.pid}: working" in (said := capsys.readouterr().out)
            assert "has said nothing for" in said

            worker.send(signal.SIGCONT)
            worker.send(signal.SIGTERM)
            assert worker.wait() == 0

    assert health.show("worker") == 1
    assert "no worker of this user runs here" in capsys.readouterr().err


def test_a_worker_that_waits_for_redis_or_for_its_servers_is_healthy(
    settings: Settings, redis_server: Embedded, tmp_path: Path, until: Until, capsys: pytest.CaptureFixture[str]
) -> None:
    redis_server.stop()
    with WorkerProcess(changed(settings, worker__servers=["http://127.0.0.1:1"]), tmp_path / "worker.log") as worker:
        until(lambda: health.show("worker") == 0 and "starting" in capsys.readouterr().out)
        assert worker.is_running


def test_a_part_that_stands_still_is_named_and_one_that_is_excused_or_over_is_not(
    quick: Pulse, until: Until, capsys: pytest.CaptureFixture[str]
) -> None:
    def seen() -> tuple[int, str]:
        return health.show("worker"), capsys.readouterr().out

    with quick as pulse:
        pulse.state = lambda: "working"
        until(lambda: seen()[0] == 0)
        for part in ("renew", "queue"):
            pulse.turned(part)
        pulse.turned("slow", 3600)

        until(lambda: "queue has stood still for" in seen()[1])
        code, said = seen()
        assert code == 1
        assert "renew has stood still for" in said
        assert "slow" not in said

        pulse.over("renew")
        pulse.excuse("queue")
        until(lambda: seen()[0] == 0)
        pulse.excuse("never begun")
        assert "never begun" not in seen()[1]


def test_systemd_is_told_of_state_and_its_watchdog_is_fed_only_while_all_parts_come_round(
    quick: Pulse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(10)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))

        with quick as pulse:
            assert systemd.recv(1000).decode().splitlines() == ["READY=1", "STATUS=starting", "WATCHDOG=1"]
            pulse.turned("queue")
            while "stood still" not in (said := systemd.recv(1000).decode()):
                pass
            assert "WATCHDOG" not in said
        while (said := systemd.recv(1000).decode()) != "STOPPING=1":
            pass


def test_what_a_dead_process_left_is_no_pulse_and_is_removed_by_the_next(
    quick: Pulse, runtime_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    child = os.spawnlp(os.P_NOWAIT, "true", "true")
    os.waitpid(child, 0)
    runtime_folder.mkdir()
    left = runtime_folder / f"pulse-worker-{child}.json"
    left.write_text(f'{{"at": {time.monotonic()}, "state": "working", "overdue": {{}}}}')

    assert health.show("worker") == 1
    with quick:
        assert not left.exists()
    assert list(runtime_folder.iterdir()) == []
    assert "no worker of this user runs here" in capsys.readouterr().err


def test_a_folder_of_another_user_is_not_written_through(quick: Pulse, runtime_folder: Path, tmp_path: Path) -> None:
    runtime_folder.symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").mkdir()

    with pytest.raises(RunError, match="is no folder of this user"):
        quick.__enter__()


def test_a_role_without_a_pulse_is_named() -> None:
    with pytest.raises(SettingsError, match=r"flower has no pulse: ask for one of worker, trainer\."):
        health.show("flower")
