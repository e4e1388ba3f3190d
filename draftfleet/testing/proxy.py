"""A TCP proxy for tests that take the network away between a process and its Redis: it passes, holds back, or cuts."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from contextlib import suppress
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

LINGER = struct.pack("ii", 1, 0)
"""A socket closed with this sends RST, as the kernel does for a connection that it does not know."""


class Proxy:
    """A context manager: in a thread of this process, on a free port. `url` leads through it."""

    def __init__(self, url: str) -> None:
        self._behind = urlsplit(url)
        self.url = ""
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._is_up = threading.Event()
        self._passing = asyncio.Event()
        self._passing.set()
        self._is_cut = False
        self._writers: set[asyncio.StreamWriter] = set()
        self._thread = threading.Thread(target=self._run, name="proxy", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self._is_up.wait()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def hold(self) -> None:
        """Become a black hole: connections stay, nothing arrives. What is sent arrives after `heal`, as in TCP."""
        self._call(self._hold)

    def cut(self) -> None:
        """Reset every connection, and each new one. What was held back is lost."""
        self._call(self._cut)

    def heal(self) -> None:
        """Let everything pass again."""
        self._call(self._heal)

    def _hold(self) -> None:
        self._passing.clear()

    def _cut(self) -> None:
        self._is_cut = True
        for writer in self._writers:
            _reset(writer)

    def _heal(self) -> None:
        self._is_cut = False
        self._passing.set()

    def _call(self, action: object) -> None:
        async def act() -> None:
            assert callable(action)
            action()

        asyncio.run_coroutine_threadsafe(act(), self._loop).result(10)

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        login, at, _ = self._behind.netloc.rpartition("@")
        self.url = self._behind._replace(netloc=f"{login}{at}127.0.0.1:{port}").geturl()
        self._is_up.set()
        await self._stop.wait()
        self._cut()
        self._passing.set()
        server.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._is_cut:
            return _reset(writer)
        try:
            far_reader, far_writer = await asyncio.open_connection(self._behind.hostname, self._behind.port)
        except OSError:  # Redis itself is away
            return _reset(writer)
        ends = {writer, far_writer}
        self._writers |= ends
        try:
            await asyncio.gather(self._pump(reader, far_writer), self._pump(far_reader, writer))
        finally:
            self._writers -= ends
            for one in ends:
                _reset(one)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One direction. Its end ends the other one, too: Redis and its clients never close only half."""
        with suppress(OSError):
            while data := await reader.read(65536):
                await self._passing.wait()
                writer.write(data)
                await writer.drain()
            await self._passing.wait()
        writer.close()


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close at once, unsent bytes and all."""
    with suppress(OSError):
        if not writer.transport.is_closing():
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER)
    writer.transport.abort()
