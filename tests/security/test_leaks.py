"""Secrets and prompts, each with words that stand nowhere else, through everything that goes wrong: who kept them?"""

from __future__ import annotations

import json
import re
import subprocess
import threading
import urllib.error
import urllib.request
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

import psutil
import pytest
import redis
from pydantic import SecretStr

from draftfleet import children, cli
from draftfleet.embedded import Embedded
from draftfleet.errors import DraftfleetError
from draftfleet.ports import free_port
from draftfleet.queue import connect
from draftfleet.records import Prompt, prompt_id
from draftfleet.redaction import remember, without_answer
from draftfleet.runs import Run
from draftfleet.settings import Settings, environment, load
from draftfleet.testing.workers import WorkerProcess, changed, enqueue
from workers.dialects import openai
from workers.report import reason_of

Until = Callable[..., Any]

KEY, OTHER_KEY = "sk-Zanzibar-4711", "sk-Quagmire-0815"
FLOWER = "Flower-Xylophone-77"
WORD = "hippopotamuses-in-Ljubljana"
"""Stands in every prompt."""


def everything_in(client: redis.Redis) -> str:
    """Every key of Redis with its value."""
    parts: list[str] = []
    for name in client.scan_iter(count=1000):
        kind = str(client.type(name))
        read = {
            "string": client.get,
            "list": lambda key: client.lrange(key, 0, -1),
            "hash": client.hgetall,
            "set": client.smembers,
            "zset": lambda key: client.zrange(key, 0, -1),
        }
        if kind in read:  # it may have expired meanwhile
            parts.append(f"{name} {read[kind](name)}")
    return "\n".join(parts)


def command_lines(processes: Iterable[int]) -> str:
    return "\n".join(" ".join(psutil.Process(pid).cmdline()) for pid in processes if psutil.pid_exists(pid))


def asked(port: int, path: str) -> str:
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}")
    request.add_header("Authorization", "Basic " + b64encode(f"draftfleet:{FLOWER}".encode()).decode())
    try:
        return str(urllib.request.urlopen(request, timeout=10).read().decode())
    except urllib.error.URLError:
        return ""


def decoded(text: str) -> str:
    """With every base64 text in it spelled out: bodies of messages are written so."""
    found = re.findall(r"[A-Za-z0-9+/]{24,}", text)
    return text + "\n".join(b64decode(one[: len(one) // 4 * 4]).decode(errors="replace") for one in found)


class Parrot(ThreadingHTTPServer):
    """A server that quotes what it was sent, key included, in every refusal. What it does stands in the prompt."""

    daemon_threads = True

    def __init__(self, always: str = "") -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.always = always
        self.keys: set[str] = set()
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def __enter__(self) -> Self:
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()

    def handle_error(self, request: object, client_address: object) -> None:
        """A worker that hung up."""


class Answer(BaseHTTPRequestHandler):
    server: Parrot

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        models = {"data": [{"id": "tiny", "owned_by": "vllm"}]}
        self.say(200, json.dumps(models)) if self.path == "/v1/models" else self.say(404, "")

    def do_POST(self) -> None:
        key = self.headers["Authorization"]
        self.server.keys.add(key)
        sent = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = sent["messages"][-1]["content"]
        kind = self.server.always or text.split()[0]
        quoted = json.dumps({"error": {"message": f"refused: {text} {key}", "request": sent}})
        if kind.isdigit():
            self.say(int(kind), quoted)
        elif kind == "garbage":
            self.say(200, quoted[1:])
        elif kind == "shape":
            self.say(200, quoted)
        elif kind == "cut":
            self.say(200, quoted, more=100)
        elif kind == "crash":
            self.close_connection = True
            self.connection.shutdown(2)
        else:
            self.say(200, json.dumps(completion(text, "abort" if kind == "abort" else "stop")))

    def say(self, status: int, body: str, more: int = 0) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body.encode()) + more))
        self.end_headers()
        self.wfile.write(body.encode())


def completion(text: str, reason: str) -> dict[str, Any]:
    message = {"role": "assistant", "content": text, "reasoning": text}
    choice = {"index": 0, "message": message, "finish_reason": reason, "token_ids": [1, 2, 3]}
    usage = {"prompt_tokens": 2, "completion_tokens": 3}
    return {"model": "tiny", "choices": [choice], "usage": usage, "prompt_token_ids": [1, 2]}


FATES = ["400", "404", "413", "422", "500", "502", "garbage", "shape", "cut", "crash", "abort", *["ok"] * 5]


def prompts_of(fates: Iterable[str]) -> list[Prompt]:
    texts = [f"{fate} {WORD} {number:03d}" for number, fate in enumerate(fates)]
    conversations = [[{"role": "user", "content": text}] for text in texts]
    return [Prompt(prompt_id(messages, None), "train", messages) for messages in conversations]


def test_a_run_with_every_fault_leaves_no_secret_and_no_prompt_where_they_do_not_belong(
    settings: Settings, run: Run, until: Until, tmp_path: Path, python: list[str]
) -> None:
    assert settings.queue.url is not None
    url = settings.queue.url.get_secret_value()
    secrets = [password_of(url), KEY, OTHER_KEY, FLOWER]
    port = free_port()
    texts: dict[str, str] = {}
    with Parrot() as one, Parrot() as other:
        (tmp_path / "keys.toml").write_text(f'"{other.url}/v1/" = "{OTHER_KEY}"')
        working = load(
            flags={
                **{"queue.url": url, "storage.url": run.storage.url, "target.model": "tiny", "run": "run"},
                **{"worker.servers": [one.url, other.url], "worker.dialect": "vllm", "worker.max_tries": 2},
                **{"worker.probe_interval_s": 0.2, "claims.sweep_s": 0.2},
                **{"worker.api_key": KEY, "worker.api_keys_file": str(tmp_path / "keys.toml")},
                **{"flower.password": FLOWER, "flower.port": port},
            }
        )
        page = children.spawn([*python, "flower"], log=tmp_path / "flower.log", env=environment(working))
        try:
            until(lambda: asked(port, "/api/workers"), what="Flower")
            names = enqueue(working, run, prompts_of([*FATES, *["ok"] * 16]), batch_size=16)
            with WorkerProcess(working, tmp_path / "worker.log") as worker:
                until(lambda: run.done() == names or not worker.is_running, what="the batches")
                assert worker.is_running, worker.log.read_text()
                until(lambda: "worker-" in asked(port, "/api/workers?refresh=1"), what="the worker in Flower")
                until(lambda: names[0] in asked(port, "/api/tasks"), what="the tasks in Flower")
                pages = ("/api/workers", "/api/tasks", "/broker", "/workers", "/tasks", "/metrics")
                texts["flower"] = "".join(asked(port, path) for path in pages)
                texts["command lines"] = command_lines([worker.pid, page.pid])
                texts["redis"] = everything_in(connect(working))
                for verb in (["status", "--json"], ["settings"], ["settings", "--json"]):
                    done = subprocess.run(
                        [*python, *verb],
                        env=environment(working),
                        capture_output=True,
                        text=True,
                        timeout=60,
                        check=False,
                    )
                    texts[" ".join(verb)] = done.stdout + done.stderr
        finally:
            children.stop(page)
        assert (one.keys, other.keys) == ({f"Bearer {KEY}"}, {f"Bearer {OTHER_KEY}"})

    texts |= {path.name: path.read_text() for path in tmp_path.glob("*.log")}
    samples = [sample for name in run.done() for sample in run.read_samples(name)]
    texts["errors in the samples"] = "".join(sample.error or "" for sample in samples)
    assert sum(sample.outcome == "failed" for sample in samples) >= 8
    assert WORD in texts["errors in the samples"], "the servers did quote the prompts"
    assert "row failed" in texts["worker.log"]
    assert "***" in texts["errors in the samples"], "the servers did quote the keys"
    assert leaks(texts, secrets) == []
    del texts["errors in the samples"]
    assert leaks(texts, [WORD]) == []


@pytest.mark.parametrize("status", ["401", "400"])
def test_a_worker_that_stops_at_a_refusal_does_not_repeat_it(
    settings: Settings, run: Run, until: Until, tmp_path: Path, status: str
) -> None:
    settings = changed(settings, worker__dialect="vllm", worker__api_key=SecretStr(KEY), worker__drain_s=0)
    client = connect(settings)
    with Parrot(always=status) as server:
        settings = changed(settings, worker__servers=[server.url])
        enqueue(settings, run, prompts_of(["ok"] * 8))
        reports: list[str] = []
        with WorkerProcess(settings, tmp_path / "worker.log") as worker:
            until(lambda: reports.append(everything_in(client)) or not worker.is_running, what="its end")
            code = worker.wait()

    assert code == 7
    assert worker.said("worker stops")
    assert leaks({"log": worker.log.read_text(), "redis": "".join(reports)}, [KEY, WORD]) == []


@pytest.mark.parametrize(
    ("written", "code"),
    [
        ("redis://:{}@127.0.0.1:{port}/0", 5),
        ("redis://:{}@127.0.0.1:1/0", 5),
        ("rediss://:{}@127.0.0.1:1/0", 5),
        ("redis://:{}/x@127.0.0.1:1/0", 2),
        ("http://:{}@127.0.0.1:1/0", 2),
        ("redis://:{}@[::1/0", 2),
        ("redis://:{}@127.0.0.1:1/0?password={}", 2),
        ("sentinel://:{}@127.0.0.1:1", 2),
        ("{}", 2),
    ],
)
def test_an_address_that_does_not_work_is_told_without_its_password(
    redis_server: Embedded,
    run: Run,
    written: str,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    wrong = "Wrong-Password-99"
    port = redis_server.url.rpartition(":")[2].partition("/")[0]
    monkeypatch.setenv("DRAFTFLEET_QUEUE__URL", written.format(wrong, wrong, port=port))

    with pytest.raises(SystemExit) as ended:
        cli.app(["--debug", "train", "--storage", run.storage.url, "--run", "run", "--target", "tiny"])

    said = capsys.readouterr()
    assert ended.value.code == code, said.err
    assert "Traceback" in said.err
    assert leaks({"said": said.out + said.err}, [wrong]) == []


@pytest.mark.parametrize("status", [400, 401, 404, 429, 500])
def test_a_refusal_is_kept_without_the_key_and_told_without_the_prompt(status: int) -> None:
    remember([KEY])
    error = openai.classify(status, {}, json.dumps({"message": f"model does not exist: {WORD} {KEY}"}))

    assert WORD in str(error), "the record of a row says why"
    assert KEY not in str(error)
    assert WORD not in error.summary
    assert WORD not in reason_of(error)
    assert KEY not in reason_of(DraftfleetError(f"it said {KEY}"))


def leaks(texts: dict[str, str], words: Iterable[str]) -> list[tuple[str, str]]:
    """Where a word stands, in plain or in base64."""
    return [(name, word) for word in words for name, text in texts.items() if word in decoded(text)]


def password_of(url: str) -> str:
    return url.split(":")[2].split("@", maxsplit=1)[0]


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        ("the server answered 400: '{\"error\": \"a \\'prompt\\'\"}'", "the server answered 400"),
        ('the server answered 400: "it\'s a\nprompt"', "the server answered 400"),
        ("no answer within 60 s", "no answer within 60 s"),
        ("read: 'a' and 'b': 'a prompt'", "read"),
    ],
)
def test_what_a_server_answered_is_cut_from_an_error(error: str, shown: str) -> None:
    assert without_answer(error) == shown
