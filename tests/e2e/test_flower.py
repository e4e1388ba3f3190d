"""Flower as it is shipped, in a real browser: a real Valkey, a real worker, a server that can be told to fail."""

from __future__ import annotations

import base64
import json
import re
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect
from pydantic import SecretStr

from draftfleet import children
from draftfleet.ports import free_port
from draftfleet.queue import GENERATE, generate_queue, make_app
from draftfleet.records import Prompt
from draftfleet.runs import Run
from draftfleet.settings import Settings, environment
from draftfleet.testing import FakeServer
from draftfleet.testing.workers import WorkerProcess, changed, enqueue

Until = Callable[..., Any]
MakePrompts = Callable[..., list[Prompt]]

OPERATOR, VIEWER = ("draftfleet", "may-act"), ("viewer", "may-look")
HOSTILE = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
WAIT_MS = 20_000


class Pages:
    """Flower as a process of its own."""

    def __init__(self, settings: Settings, log: Path) -> None:
        knobs = settings.flower
        self.url = f"http://127.0.0.1:{knobs.port}" + (f"/{knobs.url_prefix}" if knobs.url_prefix else "")
        self.log = log

    def ask(self, path: str, login: tuple[str, str] | None = None, *, method: str = "GET") -> tuple[int, str]:
        """Status and text."""
        request = urllib.request.Request(self.url + path, method=method, data=b"" if method == "POST" else None)
        if login:
            request.add_header("Authorization", "Basic " + base64.b64encode(":".join(login).encode()).decode())
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except urllib.error.URLError:
            return 0, ""

    def worker(self, until: Until) -> str:
        """The name of the one worker, once Flower knows it."""

        def names() -> list[str]:
            status, text = self.ask("/api/workers?refresh=1", OPERATOR)
            return list(json.loads(text)) if status == 200 else []

        return until(names, what="a worker in Flower")[0]


@contextmanager
def flower(settings: Settings, until: Until, log: Path) -> Generator[Pages]:
    child = children.spawn([sys.executable, "-m", "draftfleet", "flower"], log=log, env=environment(settings))
    try:
        pages = Pages(settings, log)
        until(lambda: pages.ask("/healthcheck") == (200, "OK"), what="Flower")
        yield pages
    finally:
        children.stop(child, grace_s=5)


@contextmanager
def seen_by(browser: Browser, login: tuple[str, str]) -> Generator[Page]:
    """A page of somebody who types this login where the browser asks for one."""
    credentials: Any = {"username": login[0], "password": login[1]}
    with browser.new_context(http_credentials=credentials) as context:
        page = context.new_page()
        page.set_default_timeout(WAIT_MS)
        yield page


@pytest.fixture
def settings(settings: Settings) -> Settings:
    return changed(
        settings,
        flower__port=free_port(),
        flower__password=SecretStr(OPERATOR[1]),
        flower__viewer_password=SecretStr(VIEWER[1]),
    )


def test_a_person_logs_in_and_sees_workers_a_batch_at_work_and_one_that_failed(
    *, settings: Settings, run: Run, make_prompts: MakePrompts, until: Until, tmp_path: Path, browser: Browser
) -> None:
    with FakeServer(model="tiny", latency_s=0.4) as server, seen_by(browser, VIEWER) as page:
        server.fault("status", status=400, contains="Question 10")
        settings = changed(settings, worker__servers=[server.url], worker__concurrency=1)
        with (
            flower(settings, until, tmp_path / "flower.log") as pages,
            WorkerProcess(settings, tmp_path / "worker.log"),
        ):
            enqueue(settings, run, make_prompts(1, start=10), batch_size=1)
            enqueue(settings, run, make_prompts(40, start=20), batch_size=40)
            name = pages.worker(until)

            page.goto(f"{pages.url}/workers")
            expect(page.locator("#workers-table tbody")).to_contain_text(name[-12:], timeout=WAIT_MS)
            page.goto(f"{pages.url}/tasks")
            failed = page.locator("#tasks-table tbody tr", has_text="FAILURE")
            begun = page.locator("#tasks-table tbody tr", has_text="train-000001")
            until(lambda: page.reload() and begun.get_by_text("/40 prompts, ").count(), what="progress of the batch")
            row = begun.inner_text()
            why = failed.inner_text()
            failed.locator("a[href*='/task/']").click()
            details = page.locator("#task-page").inner_text()

    assert "STARTED" in row
    assert "run run, batch train-000001" in row
    assert "run run, batch train-000000" in why
    assert "1 rows: 1 failed (1 " in why
    assert "draftfleet dead list --run run" in why
    assert "FAILURE" in details


def test_who_may_look_cannot_act_and_who_has_no_login_sees_nothing(
    *, settings: Settings, until: Until, tmp_path: Path, browser: Browser
) -> None:
    with FakeServer(model="tiny") as server, seen_by(browser, VIEWER) as page:
        settings = changed(settings, worker__servers=[server.url], flower__url_prefix="tools/flower")
        with (
            flower(settings, until, tmp_path / "flower.log") as pages,
            WorkerProcess(settings, tmp_path / "worker.log") as worker,
        ):
            name = pages.worker(until)
            acts = [
                f"/api/worker/shutdown/{name}",
                f"/api/worker/queue/cancel-consumer/{name}?queue=generate.tiny",
                f"/api/worker/pool/grow/{name}",
                "/api/task/revoke/some-id?terminate=true",
                "/api/task/send-task/draftfleet.generate",
            ]
            refused = {act: pages.ask(act, VIEWER, method="POST") for act in acts}
            other = [pages.ask(acts[0], VIEWER, method=method)[0] for method in ("PUT", "DELETE", "PATCH")]
            sights = ["/", "/tasks", "/broker", "/metrics", "/api/workers", "/api/tasks", "/static/js/flower.js", "/no"]
            unknown = {
                (path, login): pages.ask(path, login)[0]
                for path in [*sights, acts[0]]
                for login in (None, (VIEWER[0], OPERATOR[1]), (VIEWER[0], ""))
            }
            metrics = pages.ask("/metrics", VIEWER)
            page.goto(f"{pages.url}/worker/{name}")
            shown = page.locator("body").inner_text()
            buttons = page.get_by_role("button").all_inner_texts()
            said = page.evaluate(
                "path => fetch(path, {method: 'POST'}).then(answer => answer.text())", f"/tools/flower{acts[0]}"
            )
            still_runs = worker.is_running
            allowed = pages.ask(acts[0], OPERATOR, method="POST")
            worker.wait()

    assert {status for status, _ in refused.values()} == {403}
    assert set(other) == {403}
    assert "look and not act" in said
    assert set(unknown.values()) == {401}
    assert metrics[0] == 200
    assert "flower_worker_online" in metrics[1]
    assert name in shown
    assert not [text for text in buttons if re.search("shut|grow|restart|cancel|add", text, re.IGNORECASE)]
    assert still_runs
    assert allowed[0] == 200


def test_text_that_somebody_put_into_the_queue_is_shown_and_not_run(
    *, settings: Settings, until: Until, tmp_path: Path, browser: Browser
) -> None:
    with FakeServer(model="tiny") as server, seen_by(browser, OPERATOR) as page:
        settings = changed(settings, worker__servers=[server.url])
        with (
            flower(settings, until, tmp_path / "flower.log") as pages,
            WorkerProcess(settings, tmp_path / "worker.log"),
        ):
            pages.worker(until)
            app = make_app(settings)
            for task in (GENERATE, HOSTILE):
                app.send_task(task, args=[{HOSTILE: 1}], queue=generate_queue("tiny"), argsrepr=f"run {HOSTILE}")
            page.goto(f"{pages.url}/tasks")
            row = page.locator("#tasks-table tbody tr", has_text=GENERATE)
            until(lambda: page.reload() and row.get_by_text("dropped: ").count(), what="the message")
            table = page.locator("#tasks-table tbody").inner_text()
            row.locator("a[href*='/task/']").click()
            details = page.locator("#task-page").inner_text()
            title = page.title()
            images = page.locator("img[src=x]").count()

    assert HOSTILE in table
    assert HOSTILE in details
    assert title != "owned"
    assert images == 0


def test_a_batch_that_began_before_flower_did_is_seen_all_the_same(
    *, settings: Settings, run: Run, make_prompts: MakePrompts, until: Until, tmp_path: Path
) -> None:
    with FakeServer(model="tiny", latency_s=0.4) as server:
        settings = changed(settings, worker__servers=[server.url], worker__concurrency=1)
        with WorkerProcess(settings, tmp_path / "worker.log") as worker:
            enqueue(settings, run, make_prompts(60), batch_size=60)
            until(lambda: worker.said("batch taken"), what="the batch at work")
            with flower(settings, until, tmp_path / "flower.log") as pages:
                tasks = until(lambda: json.loads(pages.ask("/api/tasks", OPERATOR)[1]), what="the task")

    [task] = tasks.values()
    assert (task["name"], task["state"], task["args"]) == (GENERATE, "STARTED", "run train-000000")
    assert "/60 prompts, " in task["result"]
