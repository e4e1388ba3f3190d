"""Child processes that never outlive their parent.

The kernel kills a child when the thread that started it ends (Linux; elsewhere only `stop` does), so even a `kill -9`
of the parent leaves nothing behind. Start children from a thread that lives as long as they should.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int, sig: int = signal.SIGKILL) -> None:
    """Ask the kernel to send this process `sig` when its parent ends. To be called in the child."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, sig)
    if os.getppid() != parent_pid:  # it ended before we asked
        os.kill(os.getpid(), sig)


def tie() -> None:
    """End this process with its parent: by the kernel where it can, and by a look every second elsewhere."""
    parent = os.getppid()
    die_with_parent(parent)

    def watch() -> None:
        while os.getppid() == parent != 1:
            time.sleep(1)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def spawn(
    argv: Sequence[str],
    *,
    log: Path,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    stdin: bytes | None = None,
) -> subprocess.Popen[bytes]:
    """Start a child in a session of its own, so that a Ctrl-C reaches only the parent, with its output in `log`.

    `env` is its whole environment; this process' own where it is None.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    parent_pid = os.getpid()
    with log.open("ab") as output:
        child = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL if stdin is None else subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=env,
            cwd=cwd,
            start_new_session=True,
            preexec_fn=lambda: die_with_parent(parent_pid),  # noqa: PLW1509  it calls prctl and nothing else
        )
    if stdin is not None:
        assert child.stdin is not None
        child.stdin.write(stdin)
        child.stdin.close()
    return child


def stop(child: subprocess.Popen[bytes], *, grace_s: float = 10.0) -> int:
    """SIGTERM, then after `grace_s` seconds SIGKILL to its whole process group. Returns its exit code."""
    if child.poll() is None:
        child.terminate()
    return end(child, grace_s=grace_s)


def end(child: subprocess.Popen[bytes], *, grace_s: float = 10.0) -> int:
    """The same for one that was told to end already: a worker that is told twice does not finish what is in flight."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(grace_s)
    with contextlib.suppress(ProcessLookupError):  # nothing of its group is left
        os.killpg(child.pid, signal.SIGKILL)
    return child.wait()


def last_lines(log: Path, count: int = 15) -> str:
    """The end of a child's log, for an error message."""
    try:
        return "\n".join(log.read_text(errors="replace").splitlines()[-count:])
    except FileNotFoundError:
        return "(no log)"
