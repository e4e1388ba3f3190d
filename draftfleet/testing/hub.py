"""A hub for models and data sets that lives on this machine, and speaks as much of the protocol as an upload needs.

with Hub() as hub:
    environment["HF_ENDPOINT"], environment["HF_TOKEN"] = hub.url, TOKEN
"""

from __future__ import annotations

import base64
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

TOKEN = "hf_abcdefghijklmnopqrstuvwxyz"
"""The one that it knows."""

COMMIT = "0" * 40
"""Name of each commit."""

LARGE = (".parquet", ".safetensors")
"""Files that are uploaded beside the commit."""


class Hub(ThreadingHTTPServer):
    """Keeps repositories as branches of files. `refuses` maps the beginning of a path to the status it answers."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repos: dict[str, dict[str, dict[str, bytes]]] = {}
        self.created: list[dict[str, Any]] = []
        self.large: dict[str, bytes] = {}
        self.commits: list[str] = []
        self.refuses: dict[str, int] = {}

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self.serve_forever)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Hub  # pyright: ignore[reportIncompatibleVariableOverride]

    def log_message(self, format: str, *args: Any) -> None: ...

    def do_GET(self) -> None:
        self._route()

    def do_POST(self) -> None:
        self._route()

    def do_PUT(self) -> None:
        self._route()

    def _route(self) -> None:  # noqa: PLR0911, PLR0912  addresses, one after the other
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        path = self.path.partition("?")[0]
        hub = self.server
        if path.startswith("/lfs/"):  # an upload's address carries its own permission
            hub.large[path.removeprefix("/lfs/")] = body
            return self._answer({})
        if self.headers.get("authorization") != f"Bearer {TOKEN}":
            return self._answer({"error": "Invalid credentials in Authorization header"}, 401)
        for begin, status in hub.refuses.items():
            if path.startswith(begin):
                return self._answer({"error": "You do not have the rights"}, status)
        if path == "/api/whoami-v2":
            return self._answer({"name": "me", "type": "user", "orgs": []})
        if path == "/api/validate-yaml":
            return self._answer({"errors": [], "warnings": []})
        if path == "/api/repos/create":
            wanted = json.loads(body)
            hub.created.append(wanted)
            name = f"{wanted['organization']}/{wanted['name']}"
            hub.repos[name] = {"main": {".gitattributes": b""}}
            folder = "datasets/" if wanted.get("type") == "dataset" else ""
            return self._answer({"url": f"{hub.url}/{folder}{name}", "name": name})
        if re.fullmatch(r"(?:/datasets)?/[^/]+/[^/]+\.git/info/lfs/objects/batch", path):
            objects = [
                one | {"actions": {"upload": {"href": f"{hub.url}/lfs/{one['oid']}", "header": {}}}}
                for one in json.loads(body)["objects"]
            ]
            return self._answer({"transfer": "basic", "objects": objects})
        found = re.fullmatch(r"/api/(datasets|models)/([^/]+/[^/]+?)(?:/(\w+)/([^/]+)(/.*)?)?", path)
        if found is None:
            return self._answer({"error": path}, 404)
        kind, name, what, revision = found[1], found[2], found[3], found[4] or "main"
        if name not in hub.repos:
            return self._answer({"error": "Repository not found"}, 404, "RepoNotFound")
        branches = hub.repos[name]
        if what == "branch":
            branches[revision] = dict(branches["main"])
            return self._answer({})
        if revision not in branches:
            return self._answer({"error": "Invalid rev id"}, 404, "RevisionNotFound")
        files = branches[revision]
        match what:
            case None | "revision":
                siblings = [{"rfilename": file} for file in files]
                return self._answer({"id": name, "sha": COMMIT, "siblings": siblings, "private": False})
            case "tree":
                return self._answer([{"type": "file", "path": file, "size": 1, "oid": COMMIT} for file in files])
            case "preupload":
                wanted = json.loads(body)["files"]
                modes = [
                    {
                        "path": one["path"],
                        "uploadMode": "lfs" if one["path"].endswith(LARGE) else "regular",
                        "shouldIgnore": False,
                        "oid": None,
                    }
                    for one in wanted
                ]
                return self._answer({"files": modes})
            case "commit":
                return self._commit(name if kind == "models" else f"datasets/{name}", files, body)
            case _:
                return self._answer({"error": path}, 404)

    def _commit(self, repo: str, files: dict[str, bytes], body: bytes) -> None:
        for line in map(json.loads, body.decode().splitlines()):
            value = line["value"]
            match line["key"]:
                case "header":
                    self.server.commits.append(value["summary"])
                case "deletedFile":
                    del files[value["path"]]
                case "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                case "lfsFile":
                    files[value["path"]] = self.server.large[value["oid"]]
                case _:
                    raise AssertionError(line)
        self._answer({"commitUrl": f"{self.server.url}/{repo}/commit/{COMMIT}", "commitOid": COMMIT})

    def _answer(self, said: Any, status: int = 200, code: str | None = None) -> None:
        raw = json.dumps(said).encode()
        self.send_response(status)
        if code is not None:
            self.send_header("X-Error-Code", code)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)
