"""Run an image of the worker once: python docker/try.py [IMAGE] [--engine 'podman ...'] [--run FLAGS].

It works on a few prompts, beside an embedded Valkey and a fake server on this machine, as a user without rights on a
file system that cannot be written. Then it is stopped with rows in flight, and has to drain. Says what it saw; exit
code 0 if all of it is right.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from draftfleet.embedded import Embedded
from draftfleet.names import batch_id
from draftfleet.records import Prompt, prompt_id
from draftfleet.runs import Run
from draftfleet.settings import Worker, load
from draftfleet.storage import FileStorage
from draftfleet.testing import FakeServer
from draftfleet.testing.workers import enqueue

WITHIN_S = 180
USER = 10001
MODEL = "target"


def main() -> int:
    parser = argparse.ArgumentParser(description="Run an image of the worker once.")
    parser.add_argument("image", nargs="?", default="draftfleet-worker")
    parser.add_argument("--engine", default="podman", metavar="COMMAND", help="podman or docker, with its options")
    parser.add_argument("--run", default="", metavar="FLAGS", help="more flags for the engine's run")
    options = parser.parse_args()
    engine = shlex.split(options.engine)
    with (
        tempfile.TemporaryDirectory() as folder,
        Embedded(Path(folder) / "redis") as valkey,
        FakeServer(model=MODEL) as server,
    ):
        storage = FileStorage(Path(folder) / "storage")
        settings = load(flags={"queue.url": valkey.url, "storage.url": storage.url, "target.model": MODEL})
        run = Run.create(storage, "default", {"target.model": MODEL, "sampling.max_tokens": 64}, {})
        enqueue(settings, run, [prompt(f"question {number}") for number in range(16)])
        for path in (Path(folder), *Path(folder, "storage").rglob("*"), Path(folder, "storage")):
            path.chmod(0o777 if path.is_dir() else 0o666)
        environment = {
            "DRAFTFLEET_QUEUE__URL": valkey.url,
            "DRAFTFLEET_STORAGE__URL": "file:///data",
            "DRAFTFLEET_TARGET__MODEL": MODEL,
            "DRAFTFLEET_WORKER__SERVERS": json.dumps([server.url]),
            "DRAFTFLEET_WORKER__DRAIN_S": "5",
        }
        flags = [flag for name, value in environment.items() for flag in ("--env", f"{name}={value}")]
        name = f"draftfleet-try-{time.time_ns()}"
        confined = "--read-only --tmpfs /tmp --tmpfs /home/draftfleet/.cache"
        rights = "--cap-drop ALL --security-opt no-new-privileges --network host"
        flags += [*confined.split(), *rights.split(), "--volume", f"{storage.root}:/data", *shlex.split(options.run)]
        call([*engine, "run", "--detach", "--name", name, *flags, options.image])
        try:
            wait("shards", lambda: all(run.is_done(batch_id("train", number)) for number in (0, 1)))
            owner = next(storage.root.rglob("*.parquet")).stat().st_uid
            say("shards written", by_user=owner)
            say("health", answer=call([*engine, "exec", name, "draftfleet", "health", "worker"]).strip())
            server.fault("hang")
            enqueue(settings, run, [prompt(f"other question {number}") for number in range(8)])
            wait("rows in flight", lambda: bool(server.stats()["faults"]))
            begun = time.monotonic()
            call([*engine, "stop", "--time", str(round(Worker().longest_stop_s)), name])
            took_s = time.monotonic() - begun
            code = int(call([*engine, "inspect", "--format", "{{.State.ExitCode}}", name]))
            say("stopped", exit_code=code, seconds=round(took_s, 1), drain_s=5)
            assert (owner, code) == (USER, 0)
            assert took_s < 5 + 55
        finally:
            print(call([*engine, "logs", name]), file=sys.stderr)
            call([*engine, "rm", "--force", name])
    return 0


def prompt(text: str) -> Prompt:
    messages = [{"role": "user", "content": text}]
    return Prompt(prompt_id(messages, None), "train", messages)


def call(command: list[str]) -> str:
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if result.returncode:
        sys.exit(f"{shlex.join(command)} ended with {result.returncode}:\n{result.stdout}")
    return result.stdout


def wait(what: str, condition: Callable[[], bool]) -> None:
    end = time.monotonic() + WITHIN_S
    while not condition():
        if time.monotonic() > end:
            sys.exit(f"no {what} within {WITHIN_S} s")
        time.sleep(0.1)


def say(what: str, **fields: object) -> None:
    print(what, *(f"{name}={value}" for name, value in fields.items()), flush=True)


if __name__ == "__main__":
    sys.exit(main())
