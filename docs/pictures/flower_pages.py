"""The pictures of Flower in docs/flower.md, taken from a real one by a real browser.

    python docs/pictures/flower_pages.py

Two fake servers that refuse some rows; a worker; a run of which a part is done. Half a minute.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
import urllib.request
from base64 import b64encode
from collections.abc import Callable
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, sync_playwright

from draftfleet import children
from draftfleet.embedded import Embedded
from draftfleet.ports import free_port
from draftfleet.records import Prompt, prompt_id
from draftfleet.runs import Run
from draftfleet.settings import environment, load
from draftfleet.storage import FileStorage
from draftfleet.testing import FakeProcess
from draftfleet.testing.workers import WorkerProcess, enqueue

PLACE = Path(__file__).parent
LOGIN = {"username": "viewer", "password": "look"}
SIZES = {"wide": (1280, 620), "phone": (390, 780)}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        with Embedded(Path(folder) / "redis") as redis_server:
            take(Path(folder), redis_server.url, lambda **how: chromium.new_context(http_credentials=LOGIN, **how))  # type: ignore[arg-type]
        chromium.close()


def take(folder: Path, queue: str, browse: Callable[..., Any]) -> None:
    knobs: dict[str, Any] = {"model": "qwen3", "tokens": 40, "latency_s": 0.4}
    with FakeProcess(**knobs) as one, FakeProcess(**knobs) as other:
        for server in (one, other):
            server.fault("status", status=400, contains="Question 7")
        settings = load(
            flags={
                "queue.url": queue,
                "storage.url": f"file://{folder / 'storage'}",
                "run": "qwen3",
                "target.model": "qwen3",
                "worker.servers": [one.url, other.url],
                "worker.concurrency": 4,
                "flower.port": free_port(),
                "flower.password": "act",
                "flower.viewer_password": LOGIN["password"],
            }
        )
        run = Run.create(FileStorage(folder / "storage"), "qwen3", {"target.model": "qwen3"}, {})
        flower = children.spawn(
            [sys.executable, "-m", "draftfleet", "flower"], log=folder / "flower.log", env=environment(settings)
        )
        url = f"http://127.0.0.1:{settings.flower.port}"
        try:
            _until(lambda: _ask(f"{url}/api/tasks") is not None)
            with WorkerProcess(settings, folder / "worker.log"):
                _until(lambda: _ask(f"{url}/api/workers?refresh=1"))
                for start, num in (
                    (1000, 40),
                    (70, 8),
                    (2000, 600),
                ):  # a server that refuses all of the first is no server
                    enqueue(settings, run, _prompts(num, start), batch_size=40)
                tasks = _until(lambda: _at_work(url))
                for name, (width, height) in SIZES.items():
                    with browse(viewport={"width": width, "height": height}) as context:
                        page = context.new_page()
                        for view in ("workers", "tasks", f"task/{tasks['FAILURE']}"):
                            _shoot(page, f"{url}/{view}", PLACE / f"flower-{view.partition('/')[0]}-{name}.png")
        finally:
            children.stop(flower, grace_s=5)


def _shoot(page: Page, url: str, file: Path) -> None:
    page.goto(url)
    page.wait_for_timeout(2500)
    page.screenshot(path=str(file))
    print(f"wrote {file}")


def _prompts(num: int, start: int) -> list[Prompt]:
    asked = [[{"role": "user", "content": f"Question {start + number}?"}] for number in range(num)]
    return [Prompt(prompt_id(messages, None), "train", messages) for messages in asked]


def _at_work(url: str) -> dict[str, str] | None:
    """By state the id of a task, once some have ended, one has failed and one tells its progress."""
    tasks: dict[str, Any] = _ask(f"{url}/api/tasks") or {}
    by_state = {task["state"]: name for name, task in tasks.items()}
    shows = any("prompts" in str(task["result"]) for task in tasks.values() if task["state"] == "STARTED")
    return by_state if shows and {"FAILURE", "SUCCESS"} <= set(by_state) else None


def _ask(url: str) -> Any:
    request = urllib.request.Request(url)
    request.add_header("Authorization", "Basic " + b64encode(":".join(LOGIN.values()).encode()).decode())
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return json.load(answer)
    except OSError:
        return None


def _until(condition: Callable[[], Any]) -> Any:
    end = time.monotonic() + 120
    while time.monotonic() < end:
        if found := condition():
            return found
        time.sleep(0.2)
    raise SystemExit("it took more than two minutes")


if __name__ == "__main__":
    main()
