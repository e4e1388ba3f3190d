"""The container files, read by the real Compose and by hadolint. No engine is needed."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from draftfleet import children
from draftfleet.ports import free_port

ROOT = Path(__file__).parents[2]
TOOLS = Path(sys.prefix) / "bin"
USERS = ("redis_admin", "redis_producer", "redis_worker", "redis_trainer", "redis_flower", "flower", "grafana")
DOCKERFILE = (ROOT / "docker/Dockerfile").read_text()
TRIAL = (ROOT / "docker/trial.env").read_text()
LOCKS = sorted((ROOT / "docker/locks").glob("*.txt"))


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
    return {path.name: path.read_text() for path in (tmp_path / "secrets").iterdir() if path.name != "hf_token"}


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
    assert again["hf_token"] == "", "yours to write"


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
        "vllm": ["hf_token"],
        "sglang": ["hf_token"],
        "transformers": [],
        "trial": ["redis_producer"],
        "prometheus": [],
        "grafana": ["grafana"],
    }


def test_no_password_stands_in_what_compose_or_the_engine_can_show(
    services: dict[str, dict[str, Any]], secrets: dict[str, str]
) -> None:
    assert not any(word in json.dumps(services) for word in secrets.values())


def test_what_needs_no_disk_has_a_file_system_that_cannot_be_written(services: dict[str, dict[str, Any]]) -> None:
    read_only = {name: service.get("tmpfs") for name, service in services.items() if service.get("read_only")}

    assert set(read_only) == {"redis", "flower", "worker", "transformers"}
    assert all(read_only.values())


def test_every_port_is_on_loopback(services: dict[str, dict[str, Any]]) -> None:
    ports = {name: [port["host_ip"] for port in service.get("ports", [])] for name, service in services.items()}

    pages = ("redis", "flower", "prometheus", "grafana")
    assert {name: ports[name] for name in pages} == {name: ["127.0.0.1"] for name in pages}
    assert not any(found for name, found in ports.items() if name not in pages)


def test_every_role_waits_for_redis_shares_the_storage_and_may_do_little(services: dict[str, dict[str, Any]]) -> None:
    for name in ("flower", "producer", "worker", "trainer"):
        service = services[name]
        assert service["depends_on"]["redis"]["condition"] == "service_healthy"
        assert [v["source"] for v in service["volumes"] if v["target"] == "/data"] == ["data"]
        assert service["init"] is True
        assert service["cap_drop"] == ["ALL"]
        assert service["build"]["target"] == name


def seconds(text: str) -> int:
    """Of a duration as Compose writes it: `2m0s`."""
    parts = re.fullmatch(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?", text)
    assert parts
    hours, minutes, rest = map(int, parts.groups(default="0"))
    return hours * 3600 + minutes * 60 + rest


def test_whoever_stops_a_role_waits_for_longer_than_it_takes_by_default(services: dict[str, dict[str, Any]]) -> None:
    """Compose, systemd and Kubernetes: from SIGTERM to the end of the process at the latest."""
    from draftfleet.settings import Worker
    from trainer.child import STOP_S

    knobs = Worker()
    pod = yaml.safe_load((ROOT / "examples/kubernetes/worker.yaml").read_text())["spec"]["template"]["spec"]

    assert float(services["worker"]["environment"]["DRAFTFLEET_WORKER__DRAIN_S"]) == knobs.drain_s
    for waits_s in (
        seconds(services["worker"]["stop_grace_period"]),
        int(unit("draftfleet-worker@.service")["TimeoutStopSec"]),
        pod["terminationGracePeriodSeconds"],
    ):
        assert knobs.longest_stop_s <= waits_s <= knobs.longest_stop_s + 30
    for waits_s in (
        seconds(services["trainer"]["stop_grace_period"]),
        int(unit("draftfleet-trainer.service")["TimeoutStopSec"]),
    ):
        assert waits_s >= STOP_S + 30


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_a_server_may_load_for_longer_than_the_largest_target_does_on_gpus_of_its_own(
    services: dict[str, dict[str, Any]], name: str
) -> None:
    service = services[name]

    assert seconds(service["healthcheck"]["start_period"]) > 22 * 60
    (gpus,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert gpus["capabilities"] == ["gpu"]
    assert {"/target", "/root/.cache/huggingface"} <= {volume["target"] for volume in service["volumes"]}


def test_every_image_that_is_pulled_is_an_exact_version(services: dict[str, dict[str, Any]]) -> None:
    images = {name: service["image"] for name, service in services.items() if "build" not in service}

    assert images.keys() == {"redis", "prometheus", "grafana", "vllm", "sglang"}
    assert all(re.search(r":v?\d+\.\d+\.\d+", image) for image in images.values()), images
    assert re.search(r"^ARG PYTHON=\d+\.\d+\.\d+-", DOCKERFILE, re.MULTILINE)


def test_any_number_of_workers_runs_beside_each_other(services: dict[str, dict[str, Any]]) -> None:
    """What `--scale worker=3` needs: no fixed name, no published port."""
    assert not services["worker"].keys() & {"container_name", "hostname", "ports"}


def test_the_trial_takes_the_whole_way_with_the_settings_of_the_demo(
    services: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    text = re.sub(r"^SECRETS_DIR=.*$", f"SECRETS_DIR={tmp_path}/secrets", TRIAL, flags=re.MULTILINE)
    (tmp_path / "trial").write_text(text)
    result = compose("--profile", "trial", "config", "--format", "json", env_file=tmp_path / "trial")
    assert result.returncode == 0, result.stderr
    trial = json.loads(result.stdout)["services"]

    assert trial.keys() == {"redis", "flower", "worker", "trainer", "transformers", "trial"}
    assert trial["worker"]["environment"]["DRAFTFLEET_WORKER__SERVERS"] == '["http://transformers:8000"]'
    served, target = trial["transformers"]["command"][0], trial["trial"]["environment"]["DRAFTFLEET_TARGET__MODEL"]
    assert served == target == "/target", "this server knows a model by its path alone"
    settings = {v["target"]: v["source"] for v in trial["trial"]["volumes"]}["/home/draftfleet/draftfleet.toml"]
    assert Path(settings) == ROOT / "examples/demo.toml"
    assert subprocess.run(["sh", "-n", str(ROOT / "docker/trial.sh")], check=False, timeout=60).returncode == 0


UNITS = sorted((ROOT / "examples/systemd").glob("*.service"))


def unit(name: str) -> dict[str, str]:
    """The last value of each key."""
    lines = (ROOT / "examples/systemd" / name).read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line and not line.startswith("#"))


def test_a_unit_tries_a_fault_again_and_leaves_a_wrong_setting_as_it_is() -> None:
    from draftfleet.errors import SettingsError

    assert [path.name for path in UNITS] == [
        "draftfleet-flower.service",
        "draftfleet-trainer.service",
        "draftfleet-worker@.service",
    ]
    for path in UNITS:
        knobs = unit(path.name)
        assert knobs["Restart"] == "on-failure"
        assert knobs["RestartPreventExitStatus"].split() == [str(SettingsError.exit_code)]
        assert knobs["KillMode"] == "mixed", "children are stopped by their parent"
        assert (knobs["NoNewPrivileges"], knobs["ProtectSystem"]) == ("yes", "strict")
        assert "LoadCredential" in knobs


def test_a_watchdog_waits_for_longer_than_a_part_may_stand_still() -> None:
    from draftfleet import health

    for name in ("draftfleet-worker@.service", "draftfleet-trainer.service"):
        knobs = unit(name)
        assert knobs["Type"] == "notify"
        assert int(knobs["WatchdogSec"]) > health.SILENT_S + 2 * health.BEAT_S


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze (Debian: systemd) is not on PATH")
def test_systemd_finds_no_fault_in_the_units(tmp_path: Path) -> None:
    for path in UNITS:
        text = path.read_text().replace("/opt/draftfleet/bin/draftfleet", "/bin/true")
        (tmp_path / path.name.replace("@", "@fleet")).write_text(text)

    files = [str(path) for path in sorted(tmp_path.glob("*.service"))]
    result = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *files], capture_output=True, text=True, timeout=60, check=False
    )

    said = [line for line in result.stderr.splitlines() if "draftfleet" in line]
    assert (result.returncode, said) == (0, [])


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
        if "DRAFTFLEET_STORAGE__URL" in service.get("environment", {}):
            assert settings.storage.url == "file:///data"
            assert settings.target.path == "/target"
            user = "producer" if role == "trial" else role
            assert address(settings) == f"redis://{user}:{secrets[f'redis_{user}']}@redis:6379/0"


def test_the_dockerfile_passes_its_linter() -> None:
    result = subprocess.run(
        [tool("hadolint"), "--no-color", str(ROOT / "docker/Dockerfile")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert (result.returncode, result.stdout) == (0, "")


@pytest.mark.parametrize("target", ["producer", "worker", "flower", "trainer", "trial"])
def test_an_image_runs_its_role_as_a_user_without_rights(target: str) -> None:
    lines = _lines_of(target)

    assert [line for line in lines if line.startswith("USER ")] == ["USER 10001"]
    assert [line for line in lines if line.startswith("ENTRYPOINT ")] == ['ENTRYPOINT ["draftfleet"]']
    assert lines[-1].startswith("CMD ")


@pytest.mark.parametrize("target", ["producer", "worker", "flower"])
def test_only_the_trainers_image_brings_torch(target: str) -> None:
    assert [line for line in _lines_of(target) if "/venv" in line and line.startswith("COPY")] == [
        "COPY --from=core-packages /venv /venv",
        "COPY --from=code /code/venv /venv",
    ]
    assert "TORCH" not in " ".join(_lines_of("core-packages"))
    assert not any(re.search(r"^(torch|nvidia-.*|triton)==", path.read_text(), re.MULTILINE) for path in LOCKS)
    assert "${TORCH}" in " ".join(_lines_of("trainer-packages"))


@pytest.mark.parametrize("target", ["producer", "worker", "flower", "trainer", "trial"])
def test_an_image_that_runs_has_neither_pip_nor_a_compiler_nor_a_secret_of_the_build(target: str) -> None:
    own = [line for line in _lines_of(target) if line.startswith(("RUN", "&&", "pip"))]

    assert not any("pip" in line or "apt-get" in line or "--mount" in line for line in own)


def test_what_is_installed_is_pinned_by_hash_and_is_what_the_project_asks_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    pinned = {path.stem: _pinned(path) for path in LOCKS}

    assert pinned.keys() == {"build", "core", "trainer", "trial"}
    for asked, locks in (
        ([*project["dependencies"], *extras["s3"]], ["core"]),
        (extras["trainer"], ["core", "trainer"]),
        (extras["demo"], ["core", "trainer", "trial"]),
    ):
        versions = {name: version for lock in locks for name, version in pinned[lock].items()}
        for requirement in map(Requirement, asked):
            name = canonicalize_name(requirement.name)
            if name != "torch":
                assert requirement.specifier.contains(versions[name]), f"{requirement}: run sh docker/lock.sh"


def _pinned(path: Path) -> dict[str, str]:
    text = path.read_text()
    found = re.findall(r"^([a-z0-9-]+)==(\S+) \\\n    --hash=sha256:", text, re.MULTILINE)
    assert len(found) == len(re.findall(r"^[a-z]", text, re.MULTILINE)), "each has a version and a hash"
    return dict(found)


@pytest.mark.parametrize("role", ["worker", "trainer"])
def test_an_image_asks_its_process_whether_it_works(role: str) -> None:
    from draftfleet import health

    (line,) = [line for line in _lines_of(role) if line.startswith("HEALTHCHECK")]
    assert line.endswith(f'CMD ["draftfleet", "health", "{role}"]')
    assert role in health.ROLES


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
