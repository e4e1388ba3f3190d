"""Flower, the web page on the workers, as this project runs it."""

from __future__ import annotations

import secrets

from draftfleet.ports import free_port
from draftfleet.queue import make_app
from draftfleet.settings import Settings

OWN_UNACKED = {f"unacked_{name}": f"flower.unacked_{name}" for name in ("key", "index_key", "mutex_key")}
"""Flower consumes no task, so it has no part in putting the tasks of dead workers back: its user may not either."""


def serve(settings: Settings) -> int:
    """Run Flower in this process until it is told to stop. The login stays out of the argument list."""
    user, password = settings.flower.user, settings.flower.password
    login = f"{user}:{password.get_secret_value() if password else secrets.token_urlsafe(12)}"
    port = settings.flower.port or free_port(settings.flower.address)
    if password is None:
        print(f"Flower: http://{settings.flower.address}:{port}/ login {login}", flush=True)
    app = make_app(settings)
    app.conf.broker_transport_options |= OWN_UNACKED
    app.start(
        [
            "flower",
            f"--address={settings.flower.address}",
            f"--port={port}",
            f"--basic_auth={login}",
            "--max_tasks=10000",
            "--tasks_columns=name,uuid,state,args,result,received,started,runtime,worker",
            "--purge_offline_workers=600",
            "--logging=warning",
        ]
    )
    return 0
