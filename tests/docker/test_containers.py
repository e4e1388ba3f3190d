"""The container files, read by the real Compose and by hadolint. No engine is needed."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis

from draftfleet import children
from draftfleet.ports import free_port

ROOT = Path(__file__).parents[2]
TOOLS = Path(sys.prefix) / "bin"
USERS = ("redis_admin", "redis_producer", "redis_worker", "redis_trainer", "redis_flower", "flower", "grafana")
DOCKERFILE = (ROOT / "docker/Dockerfile").read_text()


def tool(name: str) -> str:
    """The tool of the development extra: beside the interpreter, or beside the packages it sees."""
    folders = [TOOLS, *(Path(entry).parents[2] / "bin" for entry in sys.path if entry.endswith("site-packages"))]
    return str(next(folder / name for folder in folders if (folder / name).exists()))


def compose(*args: str, env_file: Path) -> subprocess.CompletedProcess[str]:
    command = [tool("docker-compose"), "--file", str(ROOT / "compose.yaml"), "--env-file", str(env_file), *args]
    return subprocess.run(
        command, env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.fixture
def secrets(tmp_path: Path) -> dict[str, str]:
    """The passwords that docker/secrets.sh makes, by file."""
    subprocess.run(["sh", str(ROOT / "docker/secrets.sh"), str(tmp_path / "secrets")], check=True, timeout=60)
    return {path.name: path.read_text() for path in (tmp_path / "secrets").iterdir()}


@pytest.fixture
def env_file(tmp_path: Path, secrets: dict[str, str]) -> Path:
    example = (ROOT / "docker/env.example").read_text()
    text, found = re.subn(r"^SECRETS_DIR=.*$", f"SECRETS_DIR={tmp_path}/secrets", example, flags=re.MULTILINE)
    assert found == 1
    (tmp_path / "env").write_text(text)
    return tmp_path / "env"


@pytest.fixture
def services(env_file: Path) -> dict[str, dict[str, Any]]:
    result = compose("--profile", "*", "config", "--format", "json", env_file=env_file)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)["services"]


def test_compose_accepts_the_file_with_the_example_environment() -> None:
    result = compose("config", "--quiet", env_file=ROOT / "docker/env.example")

    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_compose_refuses_to_start_without_passwords_and_says_where_they_are_explained(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("")

    result = compose("config", "--quiet", env_file=tmp_path / "empty")

    assert result.returncode != 0
    assert "docker/secrets.sh" in result.stderr
    assert "docker/env.example" in result.stderr


def test_passwords_are_long_made_once_and_in_a_folder_for_its_owner_alone(
    secrets: dict[str, str], tmp_path: Path
) -> None:
    assert set(secrets) == set(USERS)
    assert all(re.fullmatch("[0-9a-f]{48}", word) for word in secrets.values())
    assert len(set(secrets.values())) == len(secrets)
    assert stat.S_IMODE((tmp_path / "secrets").stat().st_mode) == 0o700
    (tmp_path / "secrets/flower").unlink()

    subprocess.run(["sh", str(ROOT / "docker/secrets.sh"), str(tmp_path / "secrets")], check=True, timeout=60)

    again = {path.name: path.read_text() for path in (tmp_path / "secrets").iterdir()}
    assert [name for name in USERS if again[name] != secrets[name]] == ["flower"]


def test_redis_keeps_what_it_is_told_and_has_a_user_for_each_role(services: dict[str, dict[str, Any]]) -> None:
    service = services["redis"]

    command = " ".join(service["command"])
    assert "--appendonly yes" in command
    assert "--maxmemory-policy noeviction" in command
    assert "--aclfile" in command
    assert any(volume["type"] == "volume" and volume["target"] == "/data" for volume in service["volumes"])
    assert service["healthcheck"]["test"]
    assert service["user"] == "redis"


def test_the_command_of_redis_starts_one_that_knows_the_users(
    services: dict[str, dict[str, Any]], secrets: dict[str, str], tmp_path: Path, until: Callable[..., Any]
) -> None:
    """The command as Compose gives it, with the container's folders replaced by folders of this machine."""
    if shutil.which("redis-server") is None:
        told = "no redis-server on PATH: the command of the redis service cannot be tried"
        pytest.fail(told) if os.environ.get("CI") == "true" else pytest.skip(told)
    shell, flag, script = services["redis"]["command"]
    port = free_port()
    folders = {"/run/secrets": "secrets", "/run/acl": "acl", "/data": "data"}
    for inside, name in folders.items():
        (tmp_path / name).mkdir(exist_ok=True)
        script = script.replace(f"{inside} ", f"{tmp_path}/{name} ").replace(f"{inside}/", f"{tmp_path}/{name}/")
    script = script.replace("/etc/draftfleet", str(ROOT / "docker/redis")).replace("$$", "$")
    child = children.spawn(
        [shell, flag, f"{script.strip()} --port {port} --bind 127.0.0.1"], log=tmp_path / "redis.log"
    )
    try:
        worker = redis.Redis(port=port, username="worker", password=secrets["redis_worker"])
        until(lambda: is_reached(worker), what="Redis")
        with pytest.raises(redis.exceptions.NoPermissionError):
            worker.flushall()
    finally:
        children.stop(child)

    said = (tmp_path / "redis.log").read_text() + (tmp_path / "acl/users.acl").read_text()
    assert not any(word in said for word in secrets.values())


def is_reached(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except redis.ConnectionError:
        return False


def test_each_service_sees_its_own_passwords_and_no_other(services: dict[str, dict[str, Any]]) -> None:
    seen = {
        name: sorted(secret["source"] for secret in service.get("secrets", ())) for name, service in services.items()
    }

    assert seen == {
        "redis": sorted(name for name in USERS if name.startswith("redis")),
        "flower": ["flower", "redis_flower"],
        "producer": ["redis_producer"],
        "worker": ["redis_worker"],
        "trainer": ["redis_trainer"],
        "prometheus": [],
        "grafana": ["grafana"],
    }


def test_no_password_stands_in_what_compose_or_the_engine_can_show(
    services: dict[str, dict[str, Any]], secrets: dict[str, str]
) -> None:
    assert not any(word in json.dumps(services) for word in secrets.values())


def test_what_needs_no_disk_has_a_file_system_that_cannot_be_written(services: dict[str, dict[str, Any]]) -> None:
    read_only = {name: service.get("tmpfs") for name, service in services.items() if service.get("read_only")}

    assert set(read_only) == {"redis", "flower", "worker"}
    assert all(read_only.values())


def test_every_port_is_on_loopback(services: dict[str, dict[str, Any]]) -> None:
    ports = {name: [port["host_ip"] for port in service.get("ports", [])] for name, service in services.items()}

    pages = ("redis", "flower", "prometheus", "grafana")
    assert ports == {name: ["127.0.0.1"] for name in pages} | {name: [] for name in ("producer", "worker", "trainer")}


def test_every_role_waits_for_redis_shares_the_storage_and_may_do_little(services: dict[str, dict[str, Any]]) -> None:
    for name in ("flower", "producer", "worker", "trainer"):
        service = services[name]
        assert service["depends_on"]["redis"]["condition"] == "service_healthy"
        assert [v["source"] for v in service["volumes"] if v["target"] == "/data"] == ["data"]
        assert service["init"] is True
        assert service["cap_drop"] == ["ALL"]
        assert service["build"]["target"] == name


def test_a_worker_has_longer_to_stop_than_it_needs_to_drain(services: dict[str, dict[str, Any]]) -> None:
    worker = services["worker"]

    minutes, seconds = re.fullmatch(r"(?:(\d+)m)?(?:(\d+)s)?", worker["stop_grace_period"]).groups(default="0")  # pyright: ignore
    assert int(minutes) * 60 + int(seconds) >= int(worker["environment"]["DRAFTFLEET_WORKER__DRAIN_S"]) + 55


def test_the_settings_of_every_service_are_settings(
    services: dict[str, dict[str, Any]], secrets: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from draftfleet.connection import address
    from draftfleet.settings import load

    for role, service in services.items():
        with monkeypatch.context() as patch:
            for name, value in service.get("environment", {}).items():
                patch.setenv(name, value.replace("/run/secrets", f"{tmp_path}/secrets"))
            settings = load()
        if "build" in service:
            assert settings.storage.url == "file:///data"
            assert settings.target.path == "/target"
            assert address(settings) == f"redis://{role}:{secrets[f'redis_{role}']}@redis:6379/0"


def test_the_dockerfile_passes_its_linter() -> None:
    result = subprocess.run(
        [tool("hadolint"), "--no-color", str(ROOT / "docker/Dockerfile")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert (result.returncode, result.stdout) == (0, "")


@pytest.mark.parametrize("target", ["producer", "worker", "flower", "trainer"])
def test_an_image_runs_its_role_as_a_user_without_rights(target: str) -> None:
    lines = _lines_of(target)

    assert [line for line in lines if line.startswith("USER ")] == ["USER 10001"]
    assert [line for line in lines if line.startswith("ENTRYPOINT ")] == ['ENTRYPOINT ["draftfleet"]']
    assert lines[-1].startswith("CMD ")


@pytest.mark.parametrize("target", ["producer", "worker", "flower"])
def test_only_the_trainers_image_brings_torch(target: str) -> None:
    installs = " ".join(line for line in _lines_of(target) if "pip install" in line)

    assert "torch" not in installs
    assert "trainer]" not in installs
    assert "${TORCH}" in " ".join(_lines_of("trainer"))


def _lines_of(target: str) -> list[str]:
    """The instructions that make an image, those of the stages below it first."""
    stages: dict[str, tuple[str, list[str]]] = {}
    lines: list[str] = []
    for line in DOCKERFILE.splitlines():
        if begin := re.fullmatch(r"FROM (\S+) AS (\S+)", line):
            lines = []
            stages[begin[2]] = begin[1], lines
        elif line and not line.startswith("#"):
            lines.append(line)
    below, own = stages[target]
    return [*(_lines_of(below) if below in stages else []), *own]
