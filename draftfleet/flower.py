"""Flower, the web page on workers and tasks, as this project runs it.

Flower is put together here from its own parts instead of by its command, so that neither a `flowerconfig.py` in the
folder nor FLOWER_* in the environment has a say, and so that what it lacks can stand in front of it: a login for every
path, and a second one that may look and not act.
"""

from __future__ import annotations

import hmac
import logging
import secrets
import signal
from base64 import b64decode
from types import FrameType, SimpleNamespace
from typing import Any, cast

from flower.app import Flower
from flower.command import extract_settings
from flower.events import Events, EventsState
from flower.options import options
from flower.urls import settings as pages
from tornado.httputil import HTTPServerRequest
from tornado.web import RequestHandler

from draftfleet.ports import free_port
from draftfleet.queue import GENERATE, TRAIN, make_app
from draftfleet.settings import Settings

OWN_UNACKED = {f"unacked_{name}": f"flower.unacked_{name}" for name in ("key", "index_key", "mutex_key")}
"""Flower consumes no task, so it has no part in putting the tasks of dead workers back: its user may not either."""

COLUMNS = "name,args,state,result,uuid,worker,received,started,runtime"

OPEN = "/healthcheck"
"""The one path without a login: it says OK and nothing else."""

LOOKS = "/tasks/datatable"
"""The one path where a viewer may POST: Flower's table of tasks asks for its rows so."""

NOUNS = {GENERATE: "batch", TRAIN: "drafter"}


def serve(settings: Settings) -> int:
    """Run Flower in this process until it is told to stop. The logins stay out of the argument list."""
    knobs = settings.flower
    password = knobs.password.get_secret_value() if knobs.password else secrets.token_urlsafe(12)
    port = knobs.port or free_port(knobs.address)
    logins = {f"{knobs.user}:{password}": True}
    if knobs.viewer_password is not None:
        logins[f"{knobs.viewer}:{knobs.viewer_password.get_secret_value()}"] = False
    if knobs.password is None:
        prefix = f"{knobs.url_prefix}/" if knobs.url_prefix else ""
        print(f"Flower: http://{knobs.address}:{port}/{prefix} login {knobs.user}:{password}", flush=True)
    logging.getLogger("tornado.access").setLevel(logging.ERROR)  # a refused login is no news
    _configure(settings, port, list(logins))
    door = Door(settings, logins)

    def on_signal(number: int, frame: FrameType | None) -> None:
        door.io_loop.add_callback_from_signal(door.stop)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, on_signal)
    door.start_http_server()
    door.start()
    return 0


class Door(Flower):
    """Flower for who may act, and before it the door: who asks is who decides what answers."""

    def __init__(self, settings: Settings, logins: dict[str, bool]) -> None:
        """`logins` are `USER:PASSWORD`, each with whether it may act."""
        app = make_app(settings)
        app.conf.broker_transport_options |= OWN_UNACKED
        super().__init__(options=options, capp=app, **pages)
        self._logins = logins
        self.events = Progress(
            app,
            io_loop=self.io_loop,
            max_workers_in_memory=options.max_workers,
            max_tasks_in_memory=options.max_tasks,
        )
        self._for_viewers = Flower(
            options=SimpleNamespace(**options.as_dict() | {"read_only": True}), capp=app, events=self.events, **pages
        )
        self._for_viewers.inspector = self.inspector

    def find_handler(self, request: HTTPServerRequest, **kwargs: Any) -> Any:
        """Tornado's hook for what answers a request."""
        if _path(request) == OPEN:
            return super().find_handler(request, **kwargs)
        may_act = self._may_act(request)
        if may_act is None:
            return self.get_handler_delegate(request, Refused, {"status": 401})
        if may_act:
            return super().find_handler(request, **kwargs)
        if request.method not in ("GET", "HEAD") and _path(request) != LOOKS:
            return self.get_handler_delegate(request, Refused, {"status": 403})
        return self._for_viewers.find_handler(request, **kwargs)

    def _may_act(self, request: HTTPServerRequest) -> bool | None:
        """None: it has no login that holds. Every login is compared, so that the time taken tells nothing."""
        kind, _, encoded = request.headers.get("Authorization", "").partition(" ")
        try:
            given = b64decode(encoded.strip(), validate=True)
        except ValueError:
            return None
        if kind.lower() != "basic":
            return None
        fitting = [may for login, may in self._logins.items() if hmac.compare_digest(login.encode(), given)]
        return fitting[0] if fitting else None


class Refused(RequestHandler):
    """What is answered to who may not."""

    def initialize(self, status: int) -> None:
        self._status = status

    def check_xsrf_cookie(self) -> None:
        """Nothing is done, whoever asks."""

    def prepare(self) -> None:
        self.set_status(self._status)
        self.set_header("Content-Type", "text/plain; charset=UTF-8")
        if self._status == 401:
            self.set_header("WWW-Authenticate", 'Basic realm="draftfleet", charset="UTF-8"')
            self.finish("Log in: flower.user with flower.password, or flower.viewer with flower.viewer_password.\n")
        else:
            self.finish("This login may look and not act. On a node's machine: draftfleet pause, cancel or drain.\n")


class Progress(Events):
    """Text on a task at work replaces its result, and the task stays what it is: started.

    Left alone, Flower would make a state PROGRESS of it, which its button Started does not find.
    """

    def on_event(self, event: dict[str, Any]) -> None:
        """Called in the thread that listens; the state is touched in the loop alone."""
        if event["type"] == "task-progress":
            self.io_loop.add_callback(self._progressed, event)
        else:
            super().on_event(event)

    def _progressed(self, event: dict[str, Any]) -> None:
        state = cast(EventsState, self.state)
        if event["uuid"] not in state.tasks:  # it began before Flower did
            state.event(event | {"type": "task-started"})
        task = state.tasks[event["uuid"]]
        if task.state == "STARTED":
            task.result = event["result"]
            state.search_engine.upsert(task)


def format_task(task: Any) -> Any:
    """How a task is shown: Flower's own hook. `task` is a copy."""
    run, _, name = (task.args or "").strip("'\"").partition(" ")
    if task.name in NOUNS and name:
        task.args = f"run {run}, {NOUNS[task.name]} {name}"
    if task.state == "FAILURE":
        task.result = task.exception
    elif isinstance(task.result, str):
        task.result = task.result.strip("'\"") if task.result != "None" else ""
    return task


def _configure(settings: Settings, port: int, logins: list[str]) -> None:
    knobs = settings.flower
    options.address = knobs.address
    options.port = port
    options.url_prefix = knobs.url_prefix
    options.basic_auth = logins
    options.auto_refresh = True
    options.cookie_secret = secrets.token_urlsafe(64)
    options.format_task = format_task
    options.max_tasks = knobs.max_tasks
    options.persistent = False
    options.purge_offline_workers = 600
    options.tasks_columns = COLUMNS
    extract_settings()


def _path(request: HTTPServerRequest) -> str:
    """Without what `flower.url_prefix` puts before it."""
    prefix = "/" + options.url_prefix.strip("/") if options.url_prefix else ""
    return request.path.removeprefix(prefix)
