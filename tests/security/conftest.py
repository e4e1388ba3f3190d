"""A Redis with the shipped users, a Redis with TLS, and settings that reach them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest

from draftfleet import children
from draftfleet.ports import free_port
from draftfleet.settings import Settings, load

ROOT = Path(__file__).parents[2]
USERS = ("admin", "producer", "worker", "trainer", "flower")

As = Callable[..., Settings]
Start = Callable[[str, Mapping[str, object]], None]


def debian_redis() -> str:
    """Redis as distributions ship it. Skips where there is none, and fails in CI, which installs it."""
    found = shutil.which("redis-server")
    if found is None:
        told = "no redis-server on PATH: this checks against Redis as Debian ships it"
        pytest.fail(told) if os.environ.get("CI") == "true" else pytest.skip(told)
    return found


def embedded_valkey() -> str:
    from draftfleet import embedded

    return embedded.binary()


@pytest.fixture
def start_redis(tmp_path: Path, until: Callable[..., object]) -> Iterator[Start]:
    """`start_redis("redis", {"port": 7000})`: a server with that configuration until the test ends."""
    folder = tmp_path / "redis"
    folder.mkdir()
    log = folder / "redis.log"
    with ExitStack() as stack:

        def start(kind: str, config: Mapping[str, object]) -> None:
            binary = debian_redis() if kind == "redis" else embedded_valkey()
            lines = {"bind": "127.0.0.1", "dir": folder, "save": '""', "daemonize": "no", **config}
            text = "".join(f"{key} {value}\n" for key, value in lines.items())
            child = children.spawn([binary, "-"], log=log, cwd=folder, stdin=text.encode())
            stack.callback(children.stop, child)
            until(lambda: "Ready to accept connections" in log.read_text() or child.poll() is not None, what=kind)
            assert child.poll() is None, log.read_text()

        yield start


def passwords(folder: Path) -> dict[str, str]:
    """One file per user, as docker/secrets.sh makes them."""
    subprocess.run(["sh", str(ROOT / "docker/secrets.sh"), str(folder)], check=True, capture_output=True, timeout=60)
    return {user: (folder / f"redis_{user}").read_text().strip() for user in USERS}


@pytest.fixture
def acl_redis(request: pytest.FixtureRequest, tmp_path: Path, start_redis: Start) -> As:
    """Settings of a user of a Redis with the shipped ACL file: `acl_redis("worker")`."""
    words = passwords(tmp_path / "secrets")
    rendered = subprocess.run(
        ["sh", str(ROOT / "docker/redis/render.sh"), str(tmp_path / "secrets")],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    ).stdout
    assert not any(word in rendered for word in words.values())
    (tmp_path / "users.acl").write_text(rendered)
    port = free_port()

    def as_user(user: str, **flags: object) -> Settings:
        return load(
            flags={
                "queue.url": f"redis://{user}@127.0.0.1:{port}/0",
                "queue.password_file": str(tmp_path / "secrets" / f"redis_{user}"),
                "storage.url": f"file://{tmp_path}/storage",
                "target.model": "tiny",
                "run": "run",
                **flags,
            }
        )

    start_redis(getattr(request, "param", "valkey"), {"port": port, "aclfile": tmp_path / "users.acl"})
    return as_user


@pytest.fixture
def python() -> list[str]:
    return [sys.executable, "-m", "draftfleet"]
