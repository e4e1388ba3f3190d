"""`draftfleet up --detach`: the same process without a terminal, and a wait until all of its parts answer.

It is the leader of a session of its own: what ends with a terminal or an SSH session does not reach it.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from draftfleet.errors import DraftfleetError
from draftfleet.settings import Settings, environment
from draftfleet.up import hold
from draftfleet.up.foreground import introduction
from draftfleet.up.hold import Holder
from draftfleet.up.stack import with_knobs

LOOK_S = 0.1
SAY_S = 10.0
LINES = 20


def detach(settings: Settings) -> int:
    """Start it, wait, and say where it is. Raises RunBusy, or DraftfleetError where a part did not start."""
    folder = Path(settings.queue.embedded_dir).absolute()
    if hold.find(folder)[1]:
        raise hold.busy(folder)
    log = folder / "logs" / "up.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    begins_at = log.stat().st_size if log.exists() else 0
    child = _start(with_knobs(settings, "logs", file=str(log)), log)
    try:
        holder = _wait(child, folder, log, begins_at)
    except KeyboardInterrupt:
        child.terminate()
        raise
    lines = introduction(holder.flower_url, holder.flower_login, holder.logs, holder.servers)
    lines += [
        f"Up      pid {holder.pid}: it goes on when this terminal closes.",
        "Next    draftfleet produce DATA, draftfleet status --watch, draftfleet logs -f, draftfleet down",
    ]
    print("\n".join(lines), file=sys.stderr)
    return 0


def _start(settings: Settings, log: Path) -> subprocess.Popen[bytes]:
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "draftfleet", "up", "--in-background"],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment(settings),
            start_new_session=True,
        )


def _wait(child: subprocess.Popen[bytes], folder: Path, log: Path, begins_at: int) -> Holder:
    """Until it says that it is ready."""
    said_at = time.monotonic()
    while True:
        code = child.poll()
        holder = hold.read(folder)
        if code is not None:
            said = log.read_bytes()[begins_at:].decode(errors="replace").splitlines()[-LINES:]
            raise DraftfleetError(
                f"`draftfleet up` did not start: it ended with code {code}. Its log ({log}) says:\n" + "\n".join(said)
            )
        if holder is not None and holder.pid == child.pid and holder.state == "ready":
            return holder
        if time.monotonic() - said_at >= SAY_S:
            said_at = time.monotonic()
            print(f"still starting; its log is {log}", file=sys.stderr, flush=True)
        time.sleep(LOOK_S)
