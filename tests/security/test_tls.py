"""TLS to Redis, as Debian builds it, through redis-py and through Celery: a certificate is always checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import redis
import trustme

from draftfleet.errors import QueueRefused, SettingsError
from draftfleet.ports import free_port
from draftfleet.queue import connect, make_app, queued
from draftfleet.records import Prompt
from draftfleet.runs import Run
from draftfleet.settings import Settings, load
from draftfleet.testing import FakeServer
from draftfleet.testing.workers import WorkerProcess, changed, enqueue

Until = Callable[..., Any]
Start = Callable[[str, Mapping[str, object]], None]
PASSWORD = "a word:with/all@of%it"


@dataclass
class Server:
    port: int
    ca_file: str
    other_ca_file: str
    cert_file: str
    key_file: str

    def settings(self, url: str = "", **flags: object) -> Settings:
        named = {"queue.password": PASSWORD, "queue.ca_file": self.ca_file, "target.model": "tiny", "run": "run"}
        given = {**named, "queue.url": url or f"rediss://127.0.0.1:{self.port}/0", **flags}
        return load(flags={key: value for key, value in given.items() if value is not None})


@pytest.fixture(params=["no"])
def tls_redis(request: pytest.FixtureRequest, tmp_path: Path, start_redis: Start) -> Server:
    """It has no plain port. The parameter is whether clients must show a certificate."""
    authority, other = trustme.CA(), trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    other.cert_pem.write_to_path(tmp_path / "other.pem")
    for name, cert in {"server": authority.issue_cert("127.0.0.1"), "client": authority.issue_cert("client")}.items():
        cert.cert_chain_pems[0].write_to_path(tmp_path / f"{name}.pem")
        cert.private_key_pem.write_to_path(tmp_path / f"{name}.key")
    names = ("ca.pem", "other.pem", "client.pem", "client.key")
    server = Server(free_port(), *(str(tmp_path / name) for name in names))
    config = {
        "port": 0,
        "tls-port": server.port,
        "tls-cert-file": tmp_path / "server.pem",
        "tls-key-file": tmp_path / "server.key",
        "tls-ca-cert-file": tmp_path / "ca.pem",
        "tls-auth-clients": request.param,
        "requirepass": f'"{PASSWORD}"',
    }
    start_redis("redis", config)
    return server


def test_a_run_goes_through_tls_with_a_password_of_any_characters(
    tls_redis: Server, run: Run, make_prompts: Callable[..., list[Prompt]], until: Until, tmp_path: Path
) -> None:
    with FakeServer(model="tiny") as server:
        settings = tls_redis.settings(
            **{"worker.servers": [server.url], "storage.url": run.storage.url, "claims.sweep_s": 0.2}
        )
        names = enqueue(settings, run, make_prompts(16))
        assert queued(connect(settings), "tiny") == 2

        with WorkerProcess(settings, tmp_path / "worker.log"):
            until(lambda: run.done() == names, what="the batches")


def test_a_certificate_of_another_authority_is_refused_by_both_clients_with_what_to_do(
    tls_redis: Server, tmp_path: Path
) -> None:
    for ca_file in (tls_redis.other_ca_file, None):  # None: those that this machine trusts
        settings = tls_redis.settings(**{"queue.ca_file": ca_file})

        with pytest.raises(QueueRefused, match=r"not trusted.*certificate verify failed.*Set queue\.ca_file"):
            connect(settings)
        with pytest.raises(Exception, match="certificate verify failed"):
            make_app(settings).connection_for_write().ensure_connection(max_retries=1, timeout=5)

    settings = changed(tls_redis.settings(**{"queue.ca_file": None}), worker__servers=["http://127.0.0.1:9"])
    with WorkerProcess(settings, tmp_path / "worker.log") as worker:
        assert worker.wait() == 5
    assert worker.said("Set queue.ca_file")


def test_a_certificate_for_another_host_is_refused(tls_redis: Server) -> None:
    settings = tls_redis.settings(f"rediss://localhost:{tls_redis.port}/0")

    with pytest.raises(QueueRefused, match="not valid for 'localhost'"):
        connect(settings)
    with pytest.raises(Exception, match="not valid for 'localhost'"):
        make_app(settings).connection_for_write().ensure_connection(max_retries=1, timeout=5)


@pytest.mark.parametrize("tls_redis", ["yes"], indirect=True)
def test_where_redis_wants_a_clients_certificate_it_is_shown(tls_redis: Server) -> None:
    with pytest.raises(QueueRefused, match=r"wants a client's certificate.*Set queue\.cert_file and queue\.key_file"):
        connect(tls_redis.settings())

    settings = tls_redis.settings(**{"queue.cert_file": tls_redis.cert_file, "queue.key_file": tls_redis.key_file})
    assert connect(settings).ping()
    with make_app(settings).connection_for_write() as broker:
        broker.ensure_connection(max_retries=1, timeout=5)
        assert isinstance(broker.default_channel.client, redis.Redis)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"queue.url": "redis://h/0", "queue.ca_file": "ca.pem"}, r"queue\.ca_file is for TLS"),
        ({"queue.url": "rediss://h/0", "queue.ca_file": "none.pem"}, r"queue\.ca_file = none\.pem is not there"),
        ({"queue.url": "rediss://h/0", "queue.cert_file": __file__}, r"go together"),
        ({"queue.url": "rediss://h/0?ssl_cert_reqs=none"}, r"a certificate is always checked"),
        ({"queue.url": "redis://h/0?credential_provider=os:system"}, r"options behind a \?"),
        ({"queue.url": "sentinel://h:26379"}, r"Sentinel is not supported"),
        ({"queue.url": "unix:///run/redis.sock"}, r"Unix socket is not supported"),
        ({"queue.url": "redis://:one-word@h/0", "queue.password": "another"}, r"leave one of them out"),
    ],
)
def test_an_address_that_cannot_be_served_is_refused_before_anything_connects(flags: dict[str, Any], said: str) -> None:
    for use in (connect, make_app):
        with pytest.raises(SettingsError, match=said):
            use(load(flags=flags))


def test_a_cluster_is_refused_with_what_to_use_instead(start_redis: Start) -> None:
    port = free_port()
    config = {"port": port, "requirepass": "a-long-word", "cluster-enabled": "yes", "cluster-port": free_port()}

    start_redis("redis", config)
    with pytest.raises(QueueRefused, match="is a cluster, which is not supported"):
        connect(load(flags={"queue.url": f"redis://:a-long-word@127.0.0.1:{port}/0"}))
