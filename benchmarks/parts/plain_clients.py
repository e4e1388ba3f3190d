"""What people write instead: three plain clients that the fleet is measured beside. Not a benchmark by itself.

    refill       each slot of each server takes the next row as soon as it is free
    round robin  row i goes to server i modulo the number of servers, and the loop waits for a slot there
    barrier      1,000 rows at a time; the next thousand once all of them are answered

Each keeps a JSONL file of answers. `refill`, started again, leaves out the rows whose keys stand in it. They run as
processes of their own and read what to do from standard input; `run` starts one.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any

import aiohttp

BARRIER_ROWS = 1_000
AGAIN_S = 0.2
"""A row whose request broke off is put back, and its slot rests for as long."""

Row = dict[str, Any]
"""`key` and `messages`."""

Ask = Callable[[str, Row], Awaitable[None]]
Client = Callable[[Ask, list[str], list[Row], int], Awaitable[None]]


def start(kind: str, *, model: str, urls: list[str], rows: list[Row], slots: int, out: Path) -> subprocess.Popen[bytes]:
    """One of them as a process."""
    order = {"model": model, "urls": urls, "rows": rows, "slots": slots, "out": str(out)}
    with tempfile.TemporaryFile() as stdin:
        stdin.write(json.dumps(order).encode())
        stdin.seek(0)
        return subprocess.Popen([sys.executable, __file__, kind], stdin=stdin)


def answers(out: Path) -> list[dict[str, Any]]:
    """What a client has kept; a torn last line is left out."""
    return list(_lines(out)) if out.exists() else []


def _lines(out: Path) -> Iterator[dict[str, Any]]:
    for line in out.read_text().splitlines():
        try:
            yield json.loads(line)
        except ValueError:
            continue


async def refill(ask: Ask, urls: list[str], rows: list[Row], slots: int) -> None:
    waiting = list(reversed(rows))
    left = len(rows)

    async def slot(url: str) -> None:
        nonlocal left
        while left:
            if not waiting:
                await asyncio.sleep(AGAIN_S)
                continue
            row = waiting.pop()
            try:
                await ask(url, row)
                left -= 1
            except aiohttp.ClientError:
                waiting.append(row)
                await asyncio.sleep(AGAIN_S)

    await asyncio.gather(*(slot(url) for url in urls for _ in range(slots)))


async def round_robin(ask: Ask, urls: list[str], rows: list[Row], slots: int) -> None:
    free = {url: asyncio.Semaphore(slots) for url in urls}

    async def work(url: str, row: Row) -> None:
        try:
            await ask(url, row)
        finally:
            free[url].release()

    tasks: list[asyncio.Task[None]] = []
    for number, row in enumerate(rows):
        url = urls[number % len(urls)]
        await free[url].acquire()
        tasks.append(asyncio.create_task(work(url, row)))
    await asyncio.gather(*tasks)


async def barrier(ask: Ask, urls: list[str], rows: list[Row], slots: int) -> None:
    for first in range(0, len(rows), BARRIER_ROWS):
        await refill(ask, urls, rows[first : first + BARRIER_ROWS], slots)


CLIENTS: dict[str, Client] = {"refill": refill, "round robin": round_robin, "barrier": barrier}


def _main(kind: str, order: dict[str, Any]) -> None:
    out = Path(order["out"])
    known = {answer["key"] for answer in answers(out)}
    rows = [row for row in order["rows"] if row["key"] not in known]
    with out.open("ab") as file:
        asyncio.run(_ask_all(CLIENTS[kind], order, rows, file))


async def _ask_all(client: Client, order: dict[str, Any], rows: list[Row], file: IO[bytes]) -> None:
    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        await client(_asker(session, order["model"], file), order["urls"], rows, order["slots"])


def _asker(session: aiohttp.ClientSession, model: str, file: IO[bytes]) -> Ask:
    async def ask(url: str, row: Row) -> None:
        body = {"model": model, "messages": row["messages"], "max_tokens": 8192, "return_token_ids": True}
        async with session.post(f"{url}/v1/chat/completions", json=body) as response:
            response.raise_for_status()
            answer = json.loads(await response.read())
        kept = {"key": row["key"], "tokens": answer["usage"]["completion_tokens"], "answer": answer["choices"][0]}
        file.write(json.dumps(kept).encode() + b"\n")
        file.flush()

    return ask


def total_tokens(kept: Iterable[dict[str, Any]]) -> int:
    return sum(answer["tokens"] for answer in kept)


if __name__ == "__main__":
    _main(sys.argv[1], json.load(sys.stdin))
