"""What only an object store can do wrong: busy, cut off after the write, unsure who won, ignorant of the condition."""

from __future__ import annotations

import copy
import http.client
import os
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from draftfleet import drafters, settings
from draftfleet.errors import StorageError, StorageUnreadable, StorageUnsafe, StorageUnwritable
from draftfleet.runs import Run
from draftfleet.storage import open_storage, probe
from draftfleet.storage.s3 import TRIES, S3Storage

MIB = 1024 * 1024
PART = 5 * MIB

ERROR = '<?xml version="1.0"?><Error><Code>{}</Code><Message>told by the test</Message></Error>'
BUSY, CONFLICT, NOT_IMPLEMENTED = (503, "SlowDown"), (409, "ConditionalRequestConflict"), (501, "NotImplemented")
CUT_BEFORE, CUT_AFTER, CUT_BODY = "cut before", "cut after", "cut body"


@dataclass
class Proxy:
    """Stands before the store. Each request whose method is `method` takes one of `orders`, if any is left."""

    upstream: str
    method: str = "PUT"
    orders: deque[Any] = field(default_factory=deque[Any])

    def __enter__(self) -> Proxy:
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                proxy.answer(self)

            do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = answer

            def log_message(self, *_: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        body = request.rfile.read(int(request.headers.get("Content-Length") or 0))
        order = self.orders.popleft() if self.orders and request.command == self.method else None
        if order == CUT_BEFORE:
            request.close_connection = True
            return
        if isinstance(order, tuple):
            status, code = order
            self._send(request, status, {}, ERROR.format(code).encode())
            return
        upstream = http.client.HTTPConnection(self.upstream.removeprefix("http://"))
        headers = {name: value for name, value in request.headers.items() if name.lower() != "expect"}
        upstream.request(request.command, request.path, body, headers)
        reply = upstream.getresponse()
        data = reply.read()
        if order == CUT_AFTER:
            request.close_connection = True
            return
        self._send(
            request, reply.status, dict(reply.getheaders()), data, sent=len(data) // 2 if order == CUT_BODY else None
        )

    def _send(
        self,
        request: BaseHTTPRequestHandler,
        status: int,
        headers: dict[str, str],
        data: bytes,
        sent: int | None = None,
    ) -> None:
        request.send_response(status)
        for name, value in headers.items():
            if name.lower() not in ("content-length", "transfer-encoding", "connection", "date", "server"):
                request.send_header(name, value)
        asks_for_no_body = request.command == "HEAD"
        length = headers.get("Content-Length", "0") if asks_for_no_body else str(len(data))
        request.send_header("Content-Length", length)
        request.end_headers()
        if not asks_for_no_body:  # a body nobody reads would be taken for the next answer on this connection
            request.wfile.write(data[:sent])
        request.close_connection = sent is not None


@pytest.fixture(scope="module")
def the_proxy(s3_server: str) -> Iterator[Proxy]:
    with Proxy(s3_server) as proxy:
        yield proxy


@pytest.fixture
def proxy(the_proxy: Proxy) -> Proxy:
    the_proxy.method = "PUT"
    the_proxy.orders.clear()
    return the_proxy


@pytest.fixture(scope="module")
def stores(the_proxy: Proxy, s3_server: str) -> tuple[S3Storage, S3Storage]:
    """Behind the proxy, and direct. Making a client takes a second of a busy machine, so there is one of each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "user-key")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "user-secret")
        behind, direct = (
            S3Storage("s3://bucket/x", endpoint_url=address, part_bytes=PART)
            for address in (the_proxy.address, s3_server)
        )
        behind.exists("a")  # now the key is known
        direct.exists("a")
    return behind, direct


@pytest.fixture
def behind(stores: tuple[S3Storage, S3Storage], s3_url: str, monkeypatch: pytest.MonkeyPatch) -> S3Storage:
    """In a folder of its own. Nobody waits between two tries."""
    monkeypatch.setattr("botocore.retries.standard.ExponentialBackoff.delay_amount", lambda *_: 0.0)
    return at(stores[0], s3_url)


@pytest.fixture
def direct(stores: tuple[S3Storage, S3Storage], s3_url: str) -> S3Storage:
    return at(stores[1], s3_url)


def at(storage: S3Storage, url: str) -> S3Storage:
    storage = copy.copy(storage)
    storage.url, storage._prefix = url, url.rpartition("/")[2]
    return storage


@pytest.mark.parametrize(
    "orders",
    [[BUSY] * 3, [CUT_BEFORE] * 2, [CUT_AFTER], [CUT_AFTER, BUSY], [CONFLICT], [CUT_AFTER] + [BUSY] * TRIES],
    ids=["busy", "reset", "cut after the write", "cut, then busy", "conflict", "cut, then busy to the end"],
)
def test_a_put_that_is_disturbed_still_knows_that_it_won(
    behind: S3Storage, direct: S3Storage, proxy: Proxy, orders: list[Any]
) -> None:
    proxy.orders.extend(orders)

    assert behind.put_if_absent("a", b"mine") is True

    assert not proxy.orders or orders[-1] == BUSY
    assert direct.read("a") == b"mine"


@pytest.mark.parametrize("orders", [[], [BUSY], [CUT_BEFORE], [CUT_AFTER], [CONFLICT], [BUSY] * TRIES], ids=str)
def test_a_put_that_is_disturbed_still_knows_that_it_lost(
    behind: S3Storage, direct: S3Storage, proxy: Proxy, orders: list[Any]
) -> None:
    direct.put_if_absent("a", b"theirs")
    proxy.orders.extend(orders)

    assert behind.put_if_absent("a", b"mine") is False

    assert direct.read("a") == b"theirs"


def test_a_store_that_stays_busy_is_waited_for_and_the_put_asked_again_knows_its_own(
    behind: S3Storage, direct: S3Storage, proxy: Proxy
) -> None:
    proxy.method = "HEAD"
    proxy.orders.extend([BUSY] * TRIES)
    direct.put_if_absent("b", b"theirs")
    with pytest.raises(StorageUnwritable, match=r"503.*work goes on by itself"):
        behind.put_if_absent("b", b"mine")  # refused by the store, and nobody says whose object is there
    assert behind.put_if_absent("b", b"mine") is False

    proxy.method = "PUT"
    proxy.orders.extend([BUSY] * TRIES)
    with pytest.raises(StorageUnwritable, match="SlowDown"):
        behind.put_if_absent("a", b"mine")
    mark = behind._undecided[next(iter(behind._undecided))]
    direct._send("a", b"mine", mark)

    assert behind.put_if_absent("a", b"mine") is True
    assert behind.put_if_absent("a", b"mine") is False


def test_reads_and_listings_are_tried_again(behind: S3Storage, direct: S3Storage, proxy: Proxy) -> None:
    direct.put("folder/a", os.urandom(300_000))
    proxy.method = "GET"

    proxy.orders.extend([BUSY, CUT_AFTER, CUT_BODY])
    assert behind.read("folder/a") == direct.read("folder/a")
    proxy.orders.extend([BUSY, CUT_BEFORE])
    assert list(behind.list("folder")) == ["a"]
    assert not proxy.orders

    proxy.orders.extend([BUSY] * TRIES)
    with pytest.raises(StorageUnreadable, match="SlowDown"):
        behind.read("folder/a")


@pytest.mark.parametrize("disturbed", [[], [("POST", CUT_AFTER)], [("PUT", BUSY)]], ids=str)
def test_a_large_object_goes_in_parts_and_only_the_first_is_completed(
    behind: S3Storage, direct: S3Storage, proxy: Proxy, disturbed: list[tuple[str, Any]]
) -> None:
    data, other = os.urandom(PART + MIB), os.urandom(PART + MIB)
    for method, order in disturbed:
        proxy.method = method
        # The first POST begins the upload, the second completes it.
        proxy.orders.extend([None, order] if method == "POST" else [order])

    assert behind.put_if_absent("large", data) is True

    assert not proxy.orders
    assert direct.put_if_absent("large", other) is False
    assert direct.read("large") == data
    uploads = direct._client.list_multipart_uploads(Bucket="bucket", Prefix=direct._prefix)
    assert not uploads.get("Uploads")


def test_a_store_that_ignores_the_condition_is_refused(direct: S3Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    put = direct._client.put_object
    monkeypatch.setattr(direct._client, "put_object", lambda IfNoneMatch, **call: put(**call))

    with pytest.raises(StorageUnsafe, match=r"two writers.*conditional writes"):
        probe(direct)


def test_a_store_that_does_not_know_the_condition_is_refused(behind: S3Storage, proxy: Proxy) -> None:
    proxy.orders.extend([NOT_IMPLEMENTED] * TRIES)

    with pytest.raises(StorageUnsafe, match="does not know a put only if absent"):
        probe(behind)


@pytest.mark.parametrize(
    ("environment", "url", "message"),
    [
        ({"AWS_SECRET_ACCESS_KEY": "wrong"}, "s3://bucket/x", r"SignatureDoesNotMatch.*Give this node a key"),
        ({"AWS_ACCESS_KEY_ID": "unknown"}, "s3://bucket/x", r"InvalidAccessKeyId.*Give this node a key"),
        ({}, "s3://another/x", r"(AccessDenied|NoSuchBucket).*(Give this node a key|Make the bucket)"),
    ],
    ids=["wrong secret", "unknown key", "another bucket"],
)
def test_a_wrong_key_or_bucket_is_told_at_once_and_once_it_worked_is_waited_for(
    s3_url: str, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], url: str, message: str
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    storage = S3Storage(url)

    with pytest.raises(StorageError, match=message) as error:
        probe(storage)
    assert not isinstance(error.value, StorageUnwritable | StorageUnreadable)
    assert "user-secret" not in str(error.value)

    storage.expect_mark()
    with pytest.raises(StorageUnwritable, match=message):
        storage.put("a", b"")


def test_a_node_without_a_key_and_a_store_that_is_away_are_told(
    s3_url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    away = S3Storage(s3_url, endpoint_url="http://127.0.0.1:9")
    away._client.meta.config.retries["total_max_attempts"] = 1
    monkeypatch.setattr("botocore.retries.standard.ExponentialBackoff.delay_amount", lambda *_: 0.0)
    with pytest.raises(StorageUnreadable, match=r"http://127\.0\.0\.1:9"):
        away.read("a")

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    with pytest.raises(StorageError, match=r"Give this node a key.*AWS_ACCESS_KEY_ID"):
        S3Storage(s3_url).put("a", b"")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"url": "s3://"}, "write it as s3://BUCKET/PREFIX"),
        ({"url": "s3://user:password@bucket/x"}, "write it as s3://BUCKET/PREFIX"),
        ({"url": "s3://bucket", "endpoint_url": "host:8333"}, "must be http://HOST:PORT"),
        ({"url": "s3://bucket", "endpoint_url": "http://user:password@host:8333"}, "without a name or password"),
    ],
)
def test_an_address_that_cannot_be_is_refused_without_quoting_a_password(fields: dict[str, str], message: str) -> None:
    with pytest.raises(StorageError, match=message) as error:
        open_storage(settings.Storage(**fields))  # pyright: ignore[reportArgumentType]

    assert "password@" not in str(error.value)


def test_a_drafter_trained_in_a_local_folder_is_seen_by_another_node(s3_url: str, tmp_path: Path) -> None:
    one, two = (S3Storage(s3_url, local_dir=str(tmp_path / name)) for name in ("one", "two"))

    def write(storage: S3Storage, step: int, text: str) -> None:
        folder = storage.local(f"run/drafters/d/checkpoints/step-{step:06d}")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "drafter.json").write_text(text)
        (folder / "state.pt").write_text(text * 2)

    def held(storage: S3Storage) -> dict[str, str]:
        folder = storage.local("run/drafters/d/checkpoints")
        return {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*") if path.is_file()}

    path = "run/drafters/d/checkpoints"
    write(one, 100, "a")
    one.share(path)
    write(one, 200, "bb")
    one.local(f"{path}/step-000100/drafter.json").unlink()
    one.local(f"{path}/step-000100/state.pt").unlink()
    one.share(path)
    two.fetch(path)
    assert held(two) == {"step-000200/drafter.json": "bb", "step-000200/state.pt": "bbbb"}

    write(two, 300, "ccc")
    two.share(path)
    one.fetch(path)
    assert held(one) == held(two)

    # One was killed while it shared step 300, which two made too: the whole folder here beats the half there.
    one.delete(f"{path}/step-000300/state.pt")
    two.fetch(path)
    assert held(two)["step-000300/state.pt"] == "cccccc"


def test_a_drafter_without_a_local_folder_says_what_to_set(s3_url: str) -> None:
    with pytest.raises(StorageError, match=r"set storage\.local_dir"):
        S3Storage(s3_url).local("run/drafters/d")


def test_a_training_that_was_asked_for_is_known_to_nodes_without_a_local_folder(s3_url: str) -> None:
    run = Run.create(open_storage(s3_url), "asked", {}, {})
    for name in ("begun", "done"):
        run.storage.put(f"asked/drafters/{name}/drafter-settings.json", b"{}")
    run.storage.put("asked/drafters/done/progress.json", b'{"finished": true}')

    assert drafters.unfinished(run) == ["begun"]
