"""A server that hands out the tiny target's states as vLLM's connector does, and errs when it is told to."""

from __future__ import annotations

import fcntl
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from draftfleet.settings import Settings, load
from trainer import targets
from trainer.targets import Row, hf
from trainer.targets.hf import HfTarget

TINY = Path(__file__).parents[4] / "examples" / "tiny-target"
CPU = torch.device("cpu")
LAYERS = [1, 3, 6]  # as A ids
ENGINE_LAYERS = [2, 4, 7, 8]
PROBE_TOKENS = 48  # of the look at a server, which no fault hits


_ONE_AT_A_TIME = threading.Lock()
"""All engines share one model, which hears one pass at a time."""


class Engine:
    """`faults` are taken one a request, first in, first out; `hold` keeps all answers back while it is cleared."""

    def __init__(self, folder: Path, target: HfTarget, layers: list[int]) -> None:
        self.folder, self.layers = folder, layers
        self.max_model_len = 1024
        self.name, self.root = "tiny-target", str(TINY)
        self.faults: list[str] = []
        self.every: str = ""
        self.asked: list[list[int]] = []
        self.spool_bytes: list[int] = []
        self.told = "hidden_states_path"
        self.kills = 0  # tokens of the row that it cannot take
        self.port = 0
        self.hold = threading.Event()
        self.hold.set()
        self._target = target
        self._lock = threading.Lock()
        self._http: ThreadingHTTPServer | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        engine = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: object) -> None: ...

            def do_GET(self) -> None:
                model = {"id": engine.name, "root": engine.root, "max_model_len": engine.max_model_len}
                self.answer(200, {"data": [model]})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                engine.complete(self, body)

            def answer(self, status: int, body: object) -> None:
                text = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

        class Http(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 128

            def handle_error(self, request: Any, client_address: Any) -> None: ...

        self._http = Http(("127.0.0.1", self.port), Handler)
        self.port = self._http.server_port
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def stop(self) -> None:
        if self._http is not None:
            self._http.shutdown()
            self._http.server_close()
            self._http = None

    def complete(self, handler: Any, body: dict[str, Any]) -> None:
        ids = torch.tensor(body["prompt"])
        is_probe = len(ids) == PROBE_TOKENS
        with self._lock:
            fault = "" if is_probe else (self.faults.pop(0) if self.faults else self.every)
            if not is_probe:
                self.asked.append(body["prompt"])
        self.hold.wait(20)
        if fault == "dies":
            handler.connection.close()
            return
        if fault == "500" or len(ids) == self.kills:
            handler.answer(500, {"error": {"message": "engine error"}})
            return
        if fault == "too long" or len(ids) >= self.max_model_len:
            handler.answer(400, {"error": {"message": f"maximum context length is {self.max_model_len} tokens"}})
            return
        file = self.folder / f"cmpl-{handler.headers['X-Request-Id']}-0-0a1b2c3d.safetensors"
        states, token = self._states(ids)
        lock = os.open(f"{file}.lock", os.O_CREAT | os.O_WRONLY)
        fcntl.flock(lock, fcntl.LOCK_EX)
        slow = threading.Thread(target=self._write, args=(file, ids, states, fault, lock))
        slow.start()
        if fault != "slow":  # else the answer comes before the file
            slow.join()
        told = {self.told: str(file)} if self.told else {}
        handler.answer(200, {"choices": [{"token_ids": [token]}], "kv_transfer_params": told})

    def _states(self, ids: Tensor) -> tuple[Tensor, int]:
        with _ONE_AT_A_TIME:
            hidden, last = self._target.forward(ids[None])
            token = int(self._target.logits(last[0, -1]).argmax())
        every = torch.cat([hidden[0].unflatten(-1, (7, -1)), last[0][:, None]], 1)  # B ids 1 to 8
        return every[:, [layer - 1 for layer in self.layers]].contiguous(), token

    def _write(self, file: Path, ids: Tensor, states: Tensor, fault: str, lock: int) -> None:
        if fault == "slow":
            time.sleep(0.3)
        if fault == "ids":
            ids = ids.clone()
            ids[3] += 1
        if fault == "short":
            ids, states = ids[2:], states[2:].contiguous()
        if fault == "nan":
            states[2, 0, 0] = float("nan")
        if fault == "half":
            states = states.to(torch.bfloat16)
        if fault != "lost":
            save_file({"hidden_states": states, "token_ids": ids}, file)
        if fault == "torn":
            os.truncate(file, file.stat().st_size // 2)
        with self._lock:
            self.spool_bytes.append(size_of(self.folder))
        os.close(lock)


def size_of(folder: Path) -> int:
    total = 0
    for path in folder.iterdir():
        try:
            total += path.stat().st_size
        except FileNotFoundError:  # read and deleted meanwhile
            continue
    return total


@pytest.fixture(scope="session")
def every_layer() -> HfTarget:
    return hf.load(load(flags={"target.path": str(TINY)}), list(range(7)), CPU)


@pytest.fixture(scope="session")
def oracle() -> Any:
    """The same layers in this process."""
    return targets.load(load(flags={"target.path": str(TINY)}), LAYERS, CPU)


@pytest.fixture
def spool(tmp_path: Path) -> Path:
    folder = tmp_path / "spool"
    folder.mkdir()
    return folder


@pytest.fixture
def start_engine(every_layer: HfTarget, spool: Path) -> Iterator[Callable[..., Engine]]:
    with ExitStack() as stack:

        def start(layers: list[int] | None = None) -> Engine:
            engine = Engine(spool, every_layer, ENGINE_LAYERS if layers is None else layers)
            engine.start()
            stack.callback(engine.stop)
            return engine

        yield start


@pytest.fixture
def engine(start_engine: Callable[..., Engine]) -> Engine:
    return start_engine()


@pytest.fixture
def settings(spool: Path, tmp_path: Path) -> Callable[..., Settings]:
    """Settings for these engines."""

    def make(*engines: Engine, **knobs: Any) -> Settings:
        flags: dict[str, Any] = {
            "run": "r",
            "storage.url": str(tmp_path / "storage"),
            "target.path": str(TINY),
            "target.model": "tiny-target",
            "trainer.target": "vllm",
            "trainer.max_length": 256,
            "capture.servers": [engine.url for engine in engines],
            "capture.folder": str(spool),
            "capture.spool_gb": 0.01,
            "capture.ready_timeout_s": 120,
        }
        return load(flags=flags | {name.replace("__", "."): value for name, value in knobs.items()})

    return make


@pytest.fixture
def rows() -> Callable[..., list[Row]]:
    def make(*lengths: int, seed: int = 0) -> list[Row]:
        dice = torch.Generator().manual_seed(1000 * seed + sum(lengths))
        return [
            Row(f"row-{number}", torch.randint(0, 2048, (length,), generator=dice), torch.ones(length).bool())
            for number, length in enumerate(lengths)
        ]

    return make
