"""The container files, read by the real Compose and by hadolint. No engine is needed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
TOOLS = Path(sys.prefix) / "bin"
SECRETS = {"REDIS_PASSWORD": "hush-redis", "FLOWER_PASSWORD": "hush-flower", "GRAFANA_PASSWORD": "hush-grafana"}
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
def env_file(tmp_path: Path) -> Path:
    example = (ROOT / "docker/env.example").read_text()
    for name, value in SECRETS.items():
        example, found = re.subn(rf"^{name}=.*$", f"{name}={value}", example, flags=re.MULTILINE)
        assert found == 1
    (tmp_path / "env").write_text(example)
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
    assert all(name in result.stderr for name in SECRETS)
    assert "docker/env.example" in result.stderr


def test_redis_keeps_what_it_is_told_and_asks_for_a_password(services: dict[str, dict[str, Any]]) -> None:
    redis = services["redis"]

    command = " ".join(redis["command"])
    assert "--appendonly yes" in command
    assert "--maxmemory-policy noeviction" in command
    assert "requirepass" in command
    assert any(volume["type"] == "volume" and volume["target"] == "/data" for volume in redis["volumes"])
    assert redis["healthcheck"]["test"]
    assert redis["user"] == "redis"


def test_no_password_stands_on_a_command_line(services: dict[str, dict[str, Any]]) -> None:
    for name, service in services.items():
        command = json.dumps([service["command"], service.get("entrypoint"), service.get("healthcheck")])
        assert not any(secret in command for secret in SECRETS.values()), name


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
    services: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from draftfleet.settings import load

    for service in services.values():
        with monkeypatch.context() as patch:
            for name, value in service.get("environment", {}).items():
                patch.setenv(name, value)
            settings = load()
        if "build" in service:
            assert settings.storage.url == "file:///data"
            assert settings.target.path == "/target"
            assert settings.queue.url is not None
            assert settings.queue.url.get_secret_value() == "redis://:hush-redis@redis:6379/0"


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
