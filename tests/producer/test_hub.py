"""Data sets of the hub: at one commit, from a cache where there is no network, and what is said where there is nothing.

The hub is a small server of the test's own that speaks the part of the protocol which reading a data set takes.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

OLD, NEW = "a" * 40, "b" * 40

README = """---
configs:
- config_name: main
  data_files:
  - split: train
    path: main/train-*
  - split: test
    path: main/test-*
---
"""

READ = """
import json, sys
from draftfleet.errors import DataError
from draftfleet.settings import Producer
from producer.reading import Reading
from producer.sources import open_source
for given in map(json.loads, sys.argv[1:]):
    knobs = Producer(**given)
    try:
        source = open_source(knobs)
        prompts = [[prompt.source, prompt.messages[0]["content"]] for prompt in Reading(source, knobs)]
        print(json.dumps({"prompts": prompts, "provenance": source.provenance, "digest": source.digest}))
    except DataError as error:
        print(json.dumps(str(error)))
"""
"""In a process of its own: the library looks for the hub's address when it is imported, which takes seconds."""

Read = Callable[..., list[Any]]


class Hub(ThreadingHTTPServer):
    """`commits` are the files of `me/chats` at each; `revisions` what its names stand for; `gated` refuses all."""

    def __init__(self, commits: dict[str, dict[str, bytes]], revisions: dict[str, str]) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.commits = commits
        self.revisions = revisions | {commit: commit for commit in commits}
        self.gated = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Answer(BaseHTTPRequestHandler):
    server: Hub  # type: ignore[assignment]

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_POST(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = unquote(urlsplit(self.path).path)
        if not path.startswith(("/api/datasets/me/chats", "/datasets/me/chats/")):
            return self._send(404, error="RepoNotFound")
        if self.server.gated:
            return self._send(403, error="GatedRepo")
        if found := re.fullmatch(r"/datasets/me/chats/resolve/([^/]+)/(.*)", path):
            return self._file(found[1], found[2])
        if found := re.fullmatch(r"/api/datasets/me/chats/(tree|paths-info)/([^/]+)/?(.*)", path):
            asked = json.loads(body)["paths"] if body.startswith(b"{") else re.findall(r"paths=([^&]+)", body.decode())
            return self._listed(found[1], self.server.commits[found[2]], found[3], [unquote(one) for one in asked])
        found = re.fullmatch(r"/api/datasets/me/chats(?:/revision/([^/]+))?", path)
        commit = self.server.revisions.get(found[1] or "main") if found else None
        if commit is None:
            return self._send(404, error="RevisionNotFound")
        siblings = [{"rfilename": name} for name in self.server.commits[commit]]
        self._send(200, {"id": "me/chats", "sha": commit, "siblings": siblings, "private": False, "tags": []})

    def _listed(self, kind: str, files: dict[str, bytes], folder: str, paths: list[str]) -> None:
        def entry(name: str) -> dict[str, Any]:
            return {
                "type": "file",
                "path": name,
                "size": len(files[name]),
                "oid": hashlib.sha1(files[name]).hexdigest(),
            }

        folders = {str(parent) for name in files for parent in Path(name).parents} - {"."}
        wanted = (
            paths
            if kind == "paths-info"
            else [name for name in [*files, *folders] if str(Path(name).parent) == (folder or ".")]
        )
        found = [entry(name) for name in wanted if name in files]
        self._send(200, found + [{"type": "directory", "path": p, "oid": "0" * 40} for p in wanted if p in folders])

    def _file(self, commit: str, name: str) -> None:
        content = self.server.commits[self.server.revisions[commit]].get(name)
        if content is None:
            return self._send(404, error="EntryNotFound")
        status, part, headers = (
            200,
            content,
            {"X-Repo-Commit": commit, "ETag": f'"{hashlib.sha1(content).hexdigest()}"'},
        )
        if asked := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or ""):
            first, last = int(asked[1]), int(asked[2] or len(content) - 1)
            status, part = 206, content[first : last + 1]
            headers["Content-Range"] = f"bytes {first}-{first + len(part) - 1}/{len(content)}"
        self._send(status, raw=part, headers={**headers, "Accept-Ranges": "bytes"})

    def _send(
        self,
        status: int,
        value: object = None,
        *,
        raw: bytes | None = None,
        error: str = "",
        headers: dict[str, str] | None = None,
    ) -> None:
        content = json.dumps({"error": error} if error else value).encode() if raw is None else raw
        self.send_response(status)
        for name, text in {
            "Content-Type": "application/json",
            "Content-Length": str(len(content)),
            **(headers or {}),
        }.items():
            self.send_header(name, text)
        if error:
            self.send_header("X-Error-Code", error)
            self.send_header("X-Error-Message", error)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None: ...


def parquet(*questions: str) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"question": list(questions), "answer": ["?"] * len(questions)}), sink)
    return sink.getvalue().to_pybytes()


def files(*train: str) -> dict[str, bytes]:
    return {
        "README.md": README.encode(),
        "main/train-00000-of-00001.parquet": parquet(*train),
        "main/test-00000-of-00001.parquet": parquet("held?"),
    }


@pytest.fixture
def hub() -> Iterator[Hub]:
    server = Hub({OLD: files("one?", "two?"), NEW: files("one?", "two?", "three?")}, {"main": NEW, "v1": OLD})
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def read(tmp_path: Path) -> Read:
    """What each of the given knobs reads: a dict, or the text of the error."""

    def run(hub: str, *knobs: dict[str, Any], offline: bool = False) -> list[Any]:
        env = {
            **os.environ,
            "HF_ENDPOINT": hub,
            "HF_HOME": str(tmp_path / "cache"),
            "HF_HUB_OFFLINE": str(int(offline)),
        }
        env.pop("HF_HUB_CACHE", None)
        command = [sys.executable, "-c", READ, *map(json.dumps, knobs)]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240, check=True)
        assert "Retry" not in done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    return run


def texts(found: dict[str, Any]) -> list[str]:
    return [text for _, text in found["prompts"]]


def test_a_data_set_is_read_at_one_commit_which_is_recorded_with_what_was_asked(hub: Hub, read: Read) -> None:
    asked: list[dict[str, Any]] = [{}, {"revision": "v1"}, {"revision": OLD, "subset": "main"}, {"split": "test"}]

    newest, named, pinned, test = read(hub.url, *({"data": "me/chats", **one} for one in asked))

    assert newest["prompts"] == [["me/chats", "one?"], ["me/chats", "two?"], ["me/chats", "three?"]]
    assert texts(named) == texts(pinned) == ["one?", "two?"]
    assert texts(test) == ["held?"]
    commits = [(one["provenance"]["commit"], one["provenance"]["revision"]) for one in (newest, named, pinned)]
    assert commits == [(NEW, None), (OLD, "v1"), (OLD, OLD)]
    assert len({one["digest"] for one in (newest, named, pinned, test)}) == 4
    assert pinned["provenance"]["subset"] == "main"


def test_what_the_hub_has_not_is_said_with_what_to_do(hub: Hub, read: Read) -> None:
    asked: list[dict[str, Any]] = [{"split": "dev"}, {"revision": "v9"}, {"subset": "other"}, {"data": "me/nothing"}]

    split, revision, subset, name = read(hub.url, *({"data": "me/chats", **one} for one in asked))

    assert split.startswith("producer.data = me/chats, split dev: ")
    assert "Available splits: ['train', 'test']" in split
    assert "it has no revision v9: " in revision
    assert "'other' not found. Available: ['main']" in subset
    assert "the hub has none of this name that you may see; for a private one set HF_TOKEN" in name


def test_a_gated_data_set_says_where_its_terms_are(hub: Hub, read: Read) -> None:
    hub.gated = True

    (said,) = read(hub.url, {"data": "me/chats"})

    assert f"it is gated. Accept its terms on {hub.url}/datasets/me/chats" in said


@pytest.mark.parametrize("offline", [False, True])
def test_a_hub_out_of_reach_is_said_at_once_with_a_way_round(read: Read, offline: bool) -> None:
    (said,) = read("http://127.0.0.1:9", {"data": "preset:gsm8k"}, offline=offline)

    assert "the hub cannot be reached (" in said
    assert "`hf download openai/gsm8k --repo-type dataset --local-dir FOLDER`" in said


def test_a_copy_in_the_cache_is_read_where_the_hub_is_out_of_reach(read: Read, tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "hub" / "datasets--me--chats"
    for name, content in files("cached?").items():
        path = folder / "snapshots" / OLD / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(OLD)

    (found,) = read("http://127.0.0.1:9", {"data": "me/chats", "subset": "main"})

    assert texts(found) == ["cached?"]
    assert found["provenance"]["commit"] == OLD
