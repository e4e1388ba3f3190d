"""Ways to run a fake server, in a thread or as a process, and to change it while it runs."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import urllib.request
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Self

from aiohttp import web

from draftfleet.testing.behaviour import Behaviour, Fault, Kind
from draftfleet.testing.server import App


class Remote:
    """A fake server that runs somewhere, by its address."""

    def __init__(self, url: str) -> None:
        self.url = url

    def change(self, **settings: Any) -> None:
        """Change settings of `Behaviour`, for example `change(ready=False, latency_s=0.1)`."""
        self._call("/fake/faults", settings)

    def fault(self, kind: Kind, **details: Any) -> None:
        """Order a fault. The details are those of `Fault`."""
        self._call("/fake/faults", {"fault": Fault(kind=kind, **details).model_dump()})

    def clear(self) -> None:
        """Take all faults back; requests that hang or were forgotten are dropped."""
        self._call("/fake/faults", {"faults": []})

    def strike(self, kind: Kind, **details: Any) -> None:
        """Let one of `die`, `stall`, `ghost`, `other_model` strike at once, without a request."""
        self._call("/fake/faults", {"strike": Fault(kind=kind, **details).model_dump()})

    def stats(self, *, rows: bool = True) -> dict[str, Any]:
        return self._call("/fake/stats" if rows else "/fake/stats?rows=0", None)

    def _call(self, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        with urllib.request.urlopen(urllib.request.Request(self.url + path, data), timeout=30) as response:
            return json.loads(response.read())


class FakeServer(Remote):
    """In a thread of this process, on a free port. Settings are those of `Behaviour`."""

    def __init__(self, *, host: str = "127.0.0.1", port: int = 0, **settings: Any) -> None:
        super().__init__("")
        self._behaviour = Behaviour(**settings)
        self._host, self._port = host, port
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._is_up = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="fake-server", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self._is_up.wait()
        if self._error is not None:
            raise self._error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        except OSError as error:
            self._error = error
        finally:
            self._is_up.set()
            self._loop.close()

    async def _serve(self) -> None:
        async with serving(self._behaviour, self._host, self._port) as url:
            self.url = url
            self._is_up.set()
            await self._stop.wait()


class FakeProcess(Remote):
    """`draftfleet fake-server`: a process of its own, which can be killed. Settings are those of `Behaviour`.

    With `servers`, it runs so many, on consecutive ports if `port` is given; `all` has them, and `self` is the first.
    """

    def __init__(self, *, port: int = 0, servers: int = 1, **settings: Any) -> None:
        super().__init__("")
        self.all: list[Remote] = []
        behaviour = Behaviour(**settings).model_dump(exclude_unset=True)
        self._command = [sys.executable, "-m", "draftfleet", "fake-server", "--json", json.dumps(behaviour)]
        self._command += ["--port", str(port), "--servers", str(servers), "--parent", str(os.getpid())]
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(self._command, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        first = self._process.stdout.readline()
        if not first:
            self.kill()
            raise RuntimeError(f"the fake server did not start: {' '.join(self._command)}")
        self.all = [Remote(url) for url in json.loads(first)["urls"]]
        self.url = self.all[0].url
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def kill(self) -> None:
        """SIGKILL, as when a server dies."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


@asynccontextmanager
async def serving(behaviour: Behaviour, host: str, port: int) -> AsyncGenerator[str]:
    """Serve until left; gives the address."""
    # A client that goes away ends its request, as it does in vLLM.
    runner = web.AppRunner(App(behaviour).routes(), handler_cancellation=True, shutdown_timeout=0.1, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port, backlog=4096).start()
        yield f"http://{host}:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
