"""Each thing that `draftfleet doctor` is for, made wrong for real, and found."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from draftfleet import live
from draftfleet.embedded import Embedded
from draftfleet.errors import DataError
from draftfleet.live import WorkerReport
from draftfleet.names import parts_of
from draftfleet.ports import free_port
from draftfleet.queue import connect
from draftfleet.records import Prompt, Sample
from draftfleet.runs import Run
from draftfleet.settings import Settings
from draftfleet.testing import FakeProcess, FakeServer
from draftfleet.testing.workers import WorkerProcess, changed, enqueue
from workers.doctor import Case, Finding, Limits, examine, exit_code

Until = Callable[..., Any]
MakePrompts = Callable[..., list[Prompt]]
Sound = Callable[..., Settings]

TARGET = Path(__file__).parents[2] / "examples/tiny-target"
QUICK = Limits(ping_s=0.3, look_s=4, canary_s=8, answer_s=3)
NOWHERE = "http://127.0.0.1:9"


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer(model="tiny", tokenizer=str(TARGET), max_model_len=4096) as server:
        yield server


@pytest.fixture
def sound(settings: Settings, server: FakeServer) -> Sound:
    """Settings at which nothing is wrong, changed as the test wants it."""

    def make(**knobs: Any) -> Settings:
        knobs = {"worker__servers": [server.url], "target__path": str(TARGET), "sampling__max_tokens": 256} | knobs
        return changed(settings, **knobs)

    return make


def found(settings: Settings, **case: Any) -> list[Finding]:
    return examine(Case(settings=settings, **{"limits": QUICK} | case))


def at(findings: Sequence[Finding], subject: str, check: str) -> list[Finding]:
    return [one for one in findings if (one.subject, one.check) == (subject, check)]


def the(findings: Sequence[Finding], subject: str, check: str) -> Finding:
    [one] = at(findings, subject, check)
    return one


def faults(findings: Sequence[Finding]) -> set[tuple[str, str]]:
    return {(one.subject, one.check) for one in findings if one.level == "fault"}


def questions(settings: Settings, count: int) -> list[Prompt]:
    return [Prompt(f"{i:032x}", "train", [{"role": "user", "content": f"What is {i} + {i}?"}]) for i in range(count)]


def test_where_all_is_well_there_is_no_fault_and_every_subject_was_looked_at(sound: Sound, server: FakeServer) -> None:
    case = Case(settings=sound(producer__data="questions"), limits=QUICK, first_prompts=questions)

    findings = examine(case)

    assert faults(findings) == set()
    assert exit_code(findings) == 0
    assert {one.subject for one in findings} == {
        "settings", "run", "redis", "storage", "servers", "tokenizer", "processes", "gpu", "canary", "timeouts"
    }  # fmt: skip
    assert the(findings, "canary", "answers").values | {"mean_tokens": 0, "tokens_per_s_each": 0} == {
        "asked": 8,
        "answered": 8,
        "with_reasoning": 8,
        "truncated": 0,
        "ids_match": 8,
        "mean_tokens": 0,
        "tokens_per_s_each": 0,
    }
    assert the(findings, "tokenizer", "ids").values["by"] == "ids"
    assert len({asked.prompt.prompt_id for asked in case.asked}) == 8
    assert the(findings, "servers", "ready").values["version"] == "0.33.0"
    assert not connect(case.settings).keys("*doctor*")
    assert list((Path(case.settings.storage.url.removeprefix("file://")) / ".probe").iterdir()) == []


# -- servers


@pytest.mark.parametrize("thinking", [True, None])
def test_reasoning_in_a_wrong_field_is_a_fault(sound: Sound, server: FakeServer, thinking: bool | None) -> None:
    server.fault("rename_reasoning")

    finding = the(found(sound(sampling__thinking=thinking)), "canary", "reasoning")

    assert finding.level == "fault"
    assert "message.thoughts" in finding.found
    assert "reasoning parser" in finding.fix


def test_a_timeout_of_60_s_on_a_slow_server_is_a_fault_with_the_numbers(sound: Sound, server: FakeServer) -> None:
    server.change(seconds_per_token=0.01, tokens=48, spread=0)
    settings = sound(worker__request_timeout_s=60, sampling__max_tokens=8192, target__context_tokens=16384)
    server.change(max_model_len=16384)

    finding = the(found(settings), "timeouts", "request_timeout_s")

    assert finding.level == "fault"
    assert "worker.request_timeout_s = 60 would cut every long answer: 8192 tokens at 0.0" in finding.found
    assert finding.values["least_s"] >= 8192 * 0.01
    assert "--set worker.request_timeout_s=" in finding.fix


def test_a_timeout_that_fits_is_none(sound: Sound, server: FakeServer) -> None:
    server.change(seconds_per_token=0.01, spread=0)

    assert the(found(sound(worker__request_timeout_s=60)), "timeouts", "request_timeout_s").level == "ok"


def test_a_drain_shorter_than_the_answers_is_warned_of(sound: Sound, server: FakeServer) -> None:
    server.change(latency_s=0.2)

    finding = the(found(sound(worker__drain_s=0.1)), "timeouts", "drain_s")

    assert finding.level == "warning"


def test_a_stopped_server_is_a_fault_and_costs_no_other_finding(sound: Sound) -> None:
    with FakeProcess(model="tiny") as stopped:
        url = stopped.url
        stopped.kill()

        findings = found(sound(worker__servers=[url]))

    assert faults(findings) == {("servers", "ready")}
    assert f"nothing listens at {url}" in the(findings, "servers", "ready").found
    assert the(findings, "canary", "answers").level == "skipped"
    assert the(findings, "redis", "eviction").level == "ok"


def test_one_stopped_server_of_two_does_not_keep_the_other_from_its_canary(sound: Sound, server: FakeServer) -> None:
    findings = found(sound(worker__servers=[NOWHERE, server.url]))

    assert [one.level for one in at(findings, "servers", "ready")] == ["fault", "ok"]
    assert the(findings, "canary", "answers").values["answered"] == 1


def test_another_model_is_a_fault_that_names_what_is_served(sound: Sound, server: FakeServer) -> None:
    server.strike("other_model")

    finding = the(found(sound()), "servers", "model")

    assert finding.level == "fault"
    assert "serves 'other', and 'tiny' is asked for" in finding.found
    assert "--model other" in finding.fix


def test_a_server_that_loads_is_warned_of(sound: Sound, server: FakeServer) -> None:
    server.change(ready=False)

    assert the(found(sound()), "servers", "ready").level == "warning"


def test_a_server_with_another_key_is_a_fault(sound: Sound, server: FakeServer) -> None:
    server.change(api_key="another-key")

    finding = the(found(sound()), "canary", "answers")

    assert finding.level == "fault"
    assert "worker.api_key" in finding.fix


def test_a_server_that_hangs_on_prompts_ends_at_the_deadline_with_all_other_findings(
    sound: Sound, server: FakeServer
) -> None:
    server.fault("hang")

    findings = found(sound())

    assert faults(findings) == {("canary", "answers")}
    assert "gave no answer of 16 tokens within 3 s" in the(findings, "canary", "answers").found
    assert the(findings, "storage", "writes").level == "ok"


def test_what_accepts_connections_and_says_nothing_ends_at_the_deadline(sound: Sound) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        host, port = silent.getsockname()
        settings = sound(worker__servers=[f"http://{host}:{port}"])

        findings = found(changed_queue(settings, f"redis://{host}:{port}/0"), limits=Limits(look_s=2, canary_s=4))

    assert {("servers", "ready"), ("redis", "look")} <= faults(findings)
    assert "no answer within 1 s" in the(findings, "servers", "ready").found
    assert the(findings, "redis", "look").found == "no answer within 2 s"
    assert the(findings, "storage", "writes").level == "ok"


def test_max_tokens_over_the_context_of_the_server_is_a_fault(sound: Sound, server: FakeServer) -> None:
    server.change(max_model_len=200)

    assert the(found(sound()), "servers", "context").level == "fault"


def test_other_clients_of_a_server_are_warned_of(sound: Sound, server: FakeServer) -> None:
    server.change(seconds_per_token=1.0, spread=0)
    body = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "Mine."}]})
    command = ["curl", "-s", "-H", "Content-Type: application/json", "-d", body, f"{server.url}/v1/chat/completions"]
    with subprocess.Popen(command) as other:
        try:
            wait = time.monotonic() + 20
            while server.stats()["requests"] < 1 and time.monotonic() < wait:
                time.sleep(0.02)
            finding = the(found(sound()), "servers", "other clients")
        finally:
            other.kill()

    assert finding.level == "warning"
    assert finding.values["running"] == 1


class Stub(BaseHTTPRequestHandler):
    """The pages of a server, from a table; prompts are answered with 500."""

    pages: ClassVar[dict[str, str]] = {}

    def do_GET(self) -> None:
        text = self.pages.get(self.path)
        self.send_response(404 if text is None else 200)
        self.end_headers()
        self.wfile.write((text or "").encode())

    def do_POST(self) -> None:
        self.send_response(500)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def stub() -> Iterator[Callable[..., str]]:
    """`stub(owner, metrics)`: the address of a server that says this of itself."""
    with ExitStack() as stack:

        def start(owner: str, metrics: str | None = None, **entry: Any) -> str:
            models = {"data": [{"id": "tiny", "owned_by": owner, **entry}]}
            pages = {"/v1/models": json.dumps(models)} | ({} if metrics is None else {"/metrics": metrics})
            server = ThreadingHTTPServer(("127.0.0.1", 0), type("Pages", (Stub,), {"pages": pages}))
            threading.Thread(target=server.serve_forever, daemon=True).start()
            stack.callback(server.server_close)
            stack.callback(server.shutdown)
            return f"http://127.0.0.1:{server.server_address[1]}"

        yield start


@pytest.mark.parametrize(("owner", "flag"), [("sglang", "--enable-metrics"), ("llamacpp", "--metrics")])
def test_a_server_without_gauges_is_told_the_flag_for_them(
    sound: Sound, stub: Callable[..., str], owner: str, flag: str
) -> None:
    finding = the(found(sound(worker__servers=[stub(owner)])), "servers", "gauges")

    assert finding.level == "warning"
    assert flag in finding.fix


@pytest.mark.parametrize(
    ("metrics", "is_found"),
    [
        ('vllm:spec_decode_num_drafts_total{engine="0"} 0.0\n', True),
        ("sglang:spec_accept_length{} 2.5\n", True),
        ("sglang:spec_accept_length{} 0.0\n", False),
        ("vllm:num_requests_running 0.0\n", False),
    ],
)
def test_speculative_decoding_is_found_by_its_counters(
    sound: Sound, stub: Callable[..., str], metrics: str, is_found: bool
) -> None:
    findings = found(sound(worker__servers=[stub("vllm", metrics)]))

    assert [one.level for one in at(findings, "servers", "speculation")] == (["warning"] if is_found else [])


def test_servers_that_differ_and_adapters_are_warned_of(sound: Sound, stub: Callable[..., str]) -> None:
    servers = [stub("vllm", root="/models/a"), stub("vllm", root="/models/b", parent="base")]

    findings = found(sound(worker__servers=servers))

    assert "differ in root" in the(findings, "servers", "alike").found
    assert "adapter of base" in the(findings, "servers", "model").found


def test_ollama_is_refused_with_the_reason_unless_it_is_named(sound: Sound) -> None:
    with FakeServer(shape="ollama", model="tiny", tokenizer=str(TARGET)) as ollama:
        refused = found(sound(worker__servers=[ollama.url]))
        forced = found(sound(worker__servers=[ollama.url], worker__dialect="ollama"))

    assert "cuts a prompt that is over its context" in the(refused, "servers", "dialect").found
    assert "Serve the model with vLLM" in the(refused, "servers", "dialect").fix
    assert ("servers", "dialect") not in faults(forced)


def test_rows_that_think_and_rows_that_do_not_are_looked_at_apart(sound: Sound, server: FakeServer) -> None:
    settings = sound(sampling__thinking_share=0.5, producer__data="questions")
    case = Case(settings=settings, limits=QUICK, first_prompts=questions)

    findings = examine(case)

    assert at(findings, "canary", "reasoning") == []
    assert 0 < the(findings, "canary", "answers").values["with_reasoning"] < 8
    server.fault("no_reasoning")
    assert the(found(settings, first_prompts=questions), "canary", "reasoning").level == "fault"


def test_servers_of_a_dialect_without_ids_are_compared_by_counts(sound: Sound) -> None:
    with FakeServer(shape="transformers", model="tiny", tokenizer=str(TARGET)) as counting:
        findings = found(sound(worker__servers=[counting.url]))

    assert faults(findings) == set()
    assert the(findings, "tokenizer", "ids").values["by"] == "counts"


def test_without_ids_and_without_a_tokenizer_nothing_could_be_trained_on(sound: Sound) -> None:
    with FakeServer(shape="transformers", model="tiny", tokenizer=str(TARGET)) as counting:
        findings = found(sound(worker__servers=[counting.url], target__path=""))

    assert ("servers", "ids") in faults(findings)


# -- tokenizer


def other_tokenizer(folder: Path, *, template: str = "") -> str:
    """That of the tiny target, in which two letters have changed places, and with more in its template."""
    rules = json.loads((TARGET / "tokenizer.json").read_text())
    vocabulary = rules["model"]["vocab"]
    vocabulary["a"], vocabulary["e"] = vocabulary["e"], vocabulary["a"]
    (folder / "tokenizer.json").write_text(json.dumps(rules))
    (folder / "chat_template.jinja").write_text(template + (TARGET / "chat_template.jinja").read_text())
    (folder / "tokenizer_config.json").write_text((TARGET / "tokenizer_config.json").read_text())
    return str(folder)


def test_a_tokenizer_with_other_ids_is_a_fault_that_shows_the_first_difference(sound: Sound, tmp_path: Path) -> None:
    findings = found(sound(target__path=other_tokenizer(tmp_path)))

    finding = the(findings, "tokenizer", "ids")
    assert finding.level == "fault"
    assert "the first other id is number" in finding.found
    assert "--target" in finding.fix


def test_another_template_is_a_fault_where_a_server_only_counts(sound: Sound, tmp_path: Path) -> None:
    path = other_tokenizer(tmp_path, template="You are a pirate. ")
    with FakeServer(shape="transformers", model="tiny", tokenizer=str(TARGET)) as counting:
        finding = the(found(sound(worker__servers=[counting.url], target__path=path)), "tokenizer", "ids")

    assert finding.level == "fault"
    assert "there and" in finding.found


def test_a_target_that_has_no_tokenizer_is_a_fault(sound: Sound, tmp_path: Path) -> None:
    assert the(found(sound(target__path=str(tmp_path))), "tokenizer", "look").level == "fault"


# -- Redis


def changed_queue(settings: Settings, url: str) -> Settings:
    from pydantic import SecretStr

    return changed(settings, queue__url=SecretStr(url))


def test_a_redis_that_evicts_is_a_fault(sound: Sound) -> None:
    redis = connect(sound())
    redis.config_set("maxmemory-policy", "allkeys-lru")
    redis.config_set("maxmemory", "100mb")

    finding = the(found(sound()), "redis", "eviction")

    assert finding.level == "fault"
    assert finding.found.startswith("maxmemory-policy = allkeys-lru: above maxmemory = 104.9 MB")
    assert "CONFIG SET maxmemory-policy noeviction" in finding.fix


def test_a_redis_without_its_append_only_file_is_warned_of(sound: Sound) -> None:
    connect(sound()).config_set("appendonly", "no")

    assert the(found(sound()), "redis", "append only").level == "warning"


def test_a_refused_password_is_a_fault_that_does_not_show_it(sound: Sound, redis_server: Embedded) -> None:
    host = redis_server.url.rpartition("@")[2]

    findings = found(changed_queue(sound(), f"redis://:not-the-password@{host}"))

    assert the(findings, "redis", "login").level == "fault"
    assert "not-the-password" not in str([one.to_json() for one in findings])
    assert the(findings, "canary", "answers").level == "ok"


def test_a_redis_that_is_away_is_a_fault(sound: Sound) -> None:
    finding = the(found(changed_queue(sound(), f"redis://127.0.0.1:{free_port()}/0")), "redis", "answers")

    assert finding.level == "fault"


def test_an_embedded_redis_that_can_be_started_is_no_fault(sound: Sound, tmp_path: Path) -> None:
    settings = changed(sound(), queue__url=None, queue__embedded_dir=str(tmp_path / "none"))

    finding = the(found(settings), "redis", "answers")

    assert finding.level == "warning"
    assert "draftfleet up" in finding.fix
    assert not (tmp_path / "none").exists()


def test_a_user_who_may_do_too_little_is_told_what(sound: Sound, redis_server: Embedded) -> None:
    connect(sound()).execute_command(
        "ACL", "SETUSER", "poor", "on", ">long-password", "~*", "&*", "+@all", "-brpop", "-publish"
    )
    host = redis_server.url.rpartition("@")[2]

    finding = the(found(changed_queue(sound(), f"redis://poor:long-password@{host}")), "redis", "rights")

    assert finding.level == "fault"
    assert finding.values["refused"] == ["BRPOP generate.*", "PUBLISH celeryev"]


def test_too_little_memory_for_the_references_of_the_run_is_a_fault(sound: Sound, tmp_path: Path) -> None:
    redis = connect(sound())
    redis.config_set("maxmemory", str(redis.info("memory")["used_memory"] + 3_000_000))
    data = tmp_path / "prompts.jsonl"
    data.write_text('{"prompt": "Hi."}\n' * 5000)

    finding = the(found(sound(producer__data=str(data), producer__batch_size=1)), "redis", "memory")

    assert finding.level == "fault"
    assert finding.values["wanted_bytes"] == 5000 * 1300


@pytest.mark.parametrize(("ahead_s", "level"), [(0, "ok"), (10, "warning"), (-40, "fault")])
def test_clocks_that_are_apart_are_found(sound: Sound, ahead_s: float, level: str) -> None:
    findings = found(sound(), now=lambda: time.time() + ahead_s)

    assert the(findings, "redis", "clock").level == level
    assert the(findings, "storage", "clock").level == level
    assert the(findings, "redis", "clock").values["skew_s"] == pytest.approx(-ahead_s, abs=2)


# -- storage


def endless(path: Path) -> str:
    """A file with prompts at its start that is 5 TB long and takes no room."""
    path.write_text('{"prompt": "Hi."}\n' * 60_000)
    os.truncate(path, 5 * 10**12)
    return str(path)


def test_less_room_than_the_run_needs_is_a_fault_with_both_numbers(sound: Sound, tmp_path: Path) -> None:
    settings = sound(producer__data=endless(tmp_path / "prompts.jsonl"))

    finding = the(found(settings, first_prompts=questions), "storage", "room")

    assert finding.level == "fault"
    assert finding.values["low_bytes"] > finding.values["free_bytes"]
    assert "samples" in finding.found


def test_less_room_than_the_workers_want_is_a_fault(sound: Sound) -> None:
    finding = the(found(sound(storage__min_free_gb=10**6)), "storage", "room")

    assert finding.level == "fault"
    assert "workers would pause at once" in finding.found


def fill(folder: Path) -> None:
    with pytest.raises(OSError, match="No space"):
        (folder / "all").write_bytes(b"x" * 1_000_000)


def test_a_file_system_that_is_full_is_a_fault(sound: Sound, tmp_path: Path) -> None:
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder]
    if os.getuid() != 0 or subprocess.run(mount, check=False).returncode:
        pytest.skip("a file system can only be mounted as root")
    try:
        fill(folder)

        findings = found(sound(storage__url=str(folder)))
    finally:
        subprocess.run(["umount", "-l", folder], check=True)

    assert the(findings, "storage", "writes").level == "fault"
    assert "No space left" in the(findings, "storage", "writes").found
    assert the(findings, "canary", "answers").level == "ok"


def test_a_storage_that_is_no_folder_is_a_fault(sound: Sound, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    assert ("storage", "writes") in faults(found(sound(storage__url=str(tmp_path / "file"))))


# -- processes


def test_an_old_worker_on_a_server_is_a_fault_with_its_pid(sound: Sound, until: Until, tmp_path: Path) -> None:
    with WorkerProcess(sound(), tmp_path / "worker.log") as worker:
        until(lambda: worker.said("worker started"), what="the worker")
        until(lambda: live.read(connect(sound())), what="its report")

        findings = found(sound())

    taken = the(findings, "processes", "server taken")
    assert taken.level == "fault"
    assert taken.values["pid"] == worker.pid
    assert taken.fix == f"`kill {worker.pid}` drains it"
    assert worker.pid in [one.values.get("pid") for one in at(findings, "processes", "this node")]
    assert [one.level for one in at(findings, "processes", "fleet")] == ["ok"]
    assert at(findings, "processes", "celery") == []


def test_a_worker_of_an_older_version_is_warned_of(sound: Sound) -> None:
    report = WorkerReport(process="b-7-x", host="b", pid=7, started_at=0, state="working", model="tiny")
    live.publish(connect(sound()), report)

    finding = the(found(sound()), "processes", "fleet")

    assert finding.level == "warning"
    assert "b-7-x" in finding.found
    assert "draftfleet drain b" in finding.fix


def test_a_gpu_that_somebody_else_fills_is_warned_of(
    sound: Sound, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(
        "#!/bin/sh\n"
        'case "$1" in\n'
        '*query-gpu*) echo "0, GPU-a, NVIDIA H200, 90000, 143771"; echo "1, GPU-b, NVIDIA H200, 130000, 143771";;\n'
        '*) echo "GPU-a, 4711, python3, 89000"; echo "GPU-b, 4712, VLLM::EngineCore, 129000";;\n'
        "esac\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    first, second = at(found(sound()), "gpu", "memory")

    assert (first.level, second.level) == ("warning", "ok")
    assert "pid 4711 python3" in first.found


# -- settings and the run


def test_settings_that_contradict_themselves_are_found(sound: Sound) -> None:
    settings = sound(
        sampling__max_tokens=2000, producer__heldout=0, claims__renew_s=90, worker__servers=[], target__model=""
    )

    levels = {(one.check): one.level for one in found(settings) if one.subject == "settings"}

    assert levels["max_tokens"] == "fault"
    assert levels["claims"] == "fault"
    assert levels["servers"] == "fault"
    assert levels["heldout"] == "warning"


def test_a_run_with_other_settings_is_a_fault_with_each_difference(sound: Sound, run: Run) -> None:
    findings = found(sound(), pins=lambda settings: ({"target.model": "tiny", "sampling.max_tokens": 256}, {}))

    finding = the(findings, "run", "settings of the run")
    assert finding.level == "fault"
    assert finding.values["differences"] == ["sampling.max_tokens: the run has 64, now 256"]


def test_the_run_s_own_prompts_and_sampling_are_asked(
    sound: Sound, run: Run, make_prompts: MakePrompts, server: FakeServer
) -> None:
    enqueue(sound(), run, make_prompts(20))
    case = Case(settings=sound(producer__data="other"), limits=QUICK, first_prompts=questions)

    examine(case)

    assert {asked.prompt.messages[0]["content"] for asked in case.asked} == {f"Question {i}?" for i in range(8)}
    assert {asked.max_tokens for asked in case.asked} == {64}


def test_a_paused_run_is_warned_of(sound: Sound, run: Run) -> None:
    from draftfleet import control

    control.change(run, connect(sound()), state="paused", reason="lunch")

    finding = the(found(sound()), "run", "orders")

    assert finding.level == "warning"
    assert "lunch" in finding.found


def test_data_that_cannot_be_read_costs_no_canary(sound: Sound) -> None:
    def fail(settings: Settings, count: int) -> list[Prompt]:
        raise DataError("it has no column: name one with --column.")

    findings = found(sound(producer__data="x.jsonl"), first_prompts=fail)

    assert the(findings, "run", "data").level == "fault"
    assert the(findings, "canary", "answers").values["answered"] == 1


def test_a_look_that_raises_is_a_finding_beside_the_others(sound: Sound) -> None:
    def fail(settings: Settings, count: int) -> list[Prompt]:
        raise RuntimeError("a fault of ours")

    findings = found(sound(producer__data="x.jsonl"), first_prompts=fail)

    assert "a fault of ours" in the(findings, "run", "look").found
    assert the(findings, "canary", "answers").level == "ok"


def test_how_large_an_unread_data_set_will_be_is_not_guessed(sound: Sound) -> None:
    finding = the(found(sound(producer__data="a/name"), first_prompts=questions), "storage", "room")

    assert finding.level == "skipped"
    assert "not known" in finding.found


def test_finished_shards_tell_how_large_the_rest_will_be(
    sound: Sound, run: Run, make_prompts: MakePrompts, make_sample: Callable[..., Sample]
) -> None:
    prompts = make_prompts(16)
    first, _ = enqueue(sound(), run, prompts)
    run.commit(first, [make_sample(prompt) for prompt in prompts[:8]])

    finding = the(found(sound()), "storage", "room")

    assert finding.values["low_bytes"] == finding.values["high_bytes"] == run.done_bytes()[first]
    assert "8 samples" in finding.found


def test_rows_of_a_batch_that_was_split_are_counted_one_by_one(
    sound: Sound, run: Run, make_prompts: MakePrompts, make_sample: Callable[..., Sample]
) -> None:
    prompts = make_prompts(16)
    first, _ = enqueue(sound(), run, prompts)
    run.split(first, 8)
    for part, prompt in list(zip(parts_of(first, 8), prompts, strict=False))[:6]:
        run.commit(part, [make_sample(prompt, part)])

    finding = the(found(sound()), "storage", "room")

    assert "10 samples" in finding.found
