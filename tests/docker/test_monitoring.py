"""The dashboard and the alerts, held against the pages that a real worker and a trainer serve."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from draftfleet.embedded import Embedded
from draftfleet.metrics import served
from draftfleet.names import batch_id
from draftfleet.records import Prompt, prompt_id
from draftfleet.runs import Run
from draftfleet.settings import load
from draftfleet.storage import FileStorage
from draftfleet.testing import FakeServer
from draftfleet.testing.workers import WorkerProcess, enqueue
from trainer.progress import Progress
from trainer.scrape import TrainingCollector

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
DASHBOARD: dict[str, Any] = json.loads((DOCKER / "grafana/draftfleet.json").read_text())
RULES: list[dict[str, Any]] = yaml.safe_load((DOCKER / "prometheus/alerts.yml").read_text())["groups"][0]["rules"]
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]

SCRAPED = {"instance", "job"}
"""Labels that Prometheus adds."""

WAITED_FOR = {
    "draftfleet_server_kv_used_ratio",
    "draftfleet_server_requests_running",
    "draftfleet_server_requests_waiting",
    "draftfleet_server_preemptions_total",
    "draftfleet_server_generated_tokens_total",
}
"""Only where a server has gauges that the worker reads."""

Series = dict[str, list[dict[str, str]]]
"""From the name of a sample to the labels of each."""


def wait_until(condition: Callable[[], Any], deadline_s: float = 120) -> Any:
    from time import monotonic, sleep

    end = monotonic() + deadline_s
    while monotonic() < end:
        if value := condition():
            return value
        sleep(0.05)
    pytest.fail("did not happen in time")


def read_page(url: str) -> str:
    with urllib.request.urlopen(url, timeout=30) as answer:
        return answer.read().decode()


def series(text: str) -> Series:
    found: Series = {}
    for family in text_string_to_metric_families(text):
        found.setdefault(family.name if family.type != "counter" else f"{family.name}_total", [])
        for sample in family.samples:
            found.setdefault(sample.name, []).append(dict(sample.labels))
    return found


@pytest.fixture(scope="module")
def worker_page(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of a worker that had good rows, a refused one, one asked again, and one in its hands at the scrape."""
    folder = tmp_path_factory.mktemp("monitoring")
    with Embedded(folder / "redis") as redis_server, FakeServer(model="tiny", spread=0, tokens=8) as server:
        server.fault("status", status=400, contains="refused")
        server.fault("status", status=500, contains="again", times=1)
        server.fault("hang", contains="hanging")
        storage = FileStorage(folder / "storage")
        flags = {
            "queue.url": redis_server.url,
            "storage.url": storage.url,
            "target.model": "tiny",
            "worker.servers": [server.url],
            "worker.metrics_port": 0,
            "worker.checkpoint_interval_s": 0.2,
        }
        settings = load(flags=flags)
        run = Run.create(storage, "run", {"target.model": "tiny", "sampling.max_tokens": 64}, {})
        texts = ["one", "two", "refused", "again", "hanging"]
        messages = [[{"role": "user", "content": text}] for text in texts]
        prompts = [Prompt(prompt_id(one, None), "train", one) for one in messages]
        with WorkerProcess(settings, folder / "worker.log") as worker:
            (line,) = wait_until(lambda: worker.said("metrics served"))
            url = line.partition("url=")[2]
            enqueue(settings, run, prompts[:4])
            wait_until(lambda: run.is_done(batch_id("train", 0)))
            enqueue(settings, run, prompts[4:])
            return wait_until(lambda: "draftfleet_rows_in_flight 1.0" in (page := read_page(url)) and page)


@pytest.fixture(scope="module")
def trainer_page(tmp_path_factory: pytest.TempPathFactory) -> str:
    run = Run.create(FileStorage(tmp_path_factory.mktemp("training")), "run", {}, {})
    Progress(step=40, max_steps=100, loss=1.5, accuracy=[0.6, 0.4], tokens_per_s=900.0).write(run, "d")
    (run.drafter_dir("d") / "evaluation.json").write_text('{"acceptance_length": 2.25}')
    collector = TrainingCollector("host")
    collector.show(run, "d")
    collector.look()
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry()
    registry.register(collector)
    return generate_latest(registry).decode()


@pytest.fixture(scope="module")
def known(worker_page: str, trainer_page: str) -> Series:
    return series(worker_page) | series(trainer_page) | {"up": [{}]}


def expressions() -> Iterator[tuple[str, str]]:
    """Every PromQL text that we ship, with where it stands."""
    for panel in PANELS:
        for target in panel["targets"]:
            yield panel["title"], target["expr"]
    for rule in RULES:
        yield rule["alert"], rule["expr"]


def without_macros(expr: str) -> str:
    return expr.replace("$__rate_interval", "5m").replace("$worker", ".*").replace("$server", ".*")


def names_in(expr: str) -> set[str]:
    return set(re.findall(r"\b(?:draftfleet|process)_\w+|\bup\b", expr))


def mistakes(expr: str, known: Series) -> list[str]:
    """What an expression asks for that no page has."""
    wrong = [f"no metric {name}" for name in names_in(expr) if name not in known]
    labels: set[str] = set()
    for name in names_in(expr) & known.keys():
        labels |= {label for one in known[name] for label in one}
        if not known[name] and name not in WAITED_FOR:
            wrong.append(f"{name} has no series")
        if name in WAITED_FOR:
            labels.add("server")
    for name, selector in re.findall(r"(\w+)\{([^}]*)\}", expr):
        for label, sign, value in re.findall(r'(\w+)(=~|!=|=)"([^"]*)"', selector):
            if label in SCRAPED:
                continue
            values = {one[label] for one in known.get(name, []) if label in one}
            if not values and name not in WAITED_FOR:
                wrong.append(f"{name} has no label {label}")
            elif label != "server" and not set(value.split("|") if sign == "=~" else [value]) <= values:
                wrong.append(f"{name} has no {label} {value}, only {values}")
    for group in re.findall(r"\b(?:by|on) \(([^)]*)\)", expr):
        wrong += [f"no label {one}" for one in re.split(r", *", group) if one not in labels | SCRAPED]
    return wrong


@pytest.mark.parametrize(("where", "expr"), list(expressions()))
def test_what_the_dashboard_and_the_alerts_ask_for_is_served(where: str, expr: str, known: Series) -> None:
    assert names_in(expr)
    assert mistakes(without_macros(expr), known) == []


def test_the_look_at_expressions_sees_what_is_wrong(known: Series) -> None:
    assert mistakes("rate(draftfleet_row_total[5m])", known) == ["no metric draftfleet_row_total"]
    assert mistakes('draftfleet_rows_total{result="ok"}', known) == ["draftfleet_rows_total has no label result"]
    assert "has no outcome fine" in mistakes('draftfleet_rows_total{outcome="fine"}', known)[0]
    assert mistakes("sum by (batch) (draftfleet_rows_total)", known) == ["no label batch"]


def test_the_worker_counts_each_row_once_by_how_it_ended(worker_page: str) -> None:
    values = {
        (sample.name, *(sample.labels.get(label, "") for label in ("outcome", "kind"))): sample.value
        for family in text_string_to_metric_families(worker_page)
        for sample in family.samples
    }

    assert values["draftfleet_rows_total", "ok", ""] == 3
    assert values["draftfleet_rows_total", "failed", "bad_request"] == 1
    assert values["draftfleet_faults_total", "", "transient"] == 1
    assert values["draftfleet_faults_total", "", "bad_request"] == 1
    assert values["draftfleet_tokens_total", "", ""] == 3 * 8
    assert values["draftfleet_request_seconds_count", "", ""] == 3
    assert values["draftfleet_queue_wait_seconds_count", "", ""] == 6, "each time that a row got a slot"
    assert values["draftfleet_batches_held", "", ""] == 1
    assert values["draftfleet_batches_taken_total", "", ""] == 2


def test_no_label_names_a_batch_a_row_or_a_text(worker_page: str, trainer_page: str) -> None:
    allowed = {"server", "outcome", "kind", "cause", "state", "end", "le", "host", "model", "version", "run", "run_id"}

    labels = {label for one in series(worker_page).values() for labels in one for label in labels}
    trained = {label for one in series(trainer_page).values() for labels in one for label in labels}

    assert labels <= allowed
    assert trained <= {"run", "drafter", "position", "host", "version"}
    assert "hanging" not in worker_page


def test_the_trainers_page_shows_what_its_training_wrote(trainer_page: str) -> None:
    assert 'draftfleet_training_step{drafter="d",run="run"} 40.0' in trainer_page
    assert 'draftfleet_training_accuracy_ratio{drafter="d",position="1",run="run"} 0.4' in trainer_page
    assert 'draftfleet_acceptance_length_tokens{drafter="d",run="run"} 2.25' in trainer_page


def test_the_page_of_the_docs_names_every_metric_with_its_type_and_meaning(worker_page: str, trainer_page: str) -> None:
    page = (ROOT / "docs/metrics.md").read_text()
    rows = re.findall(r"^\| `(draftfleet_\w+)` \| (\w+) \| ([^|]*) \| (.*) \|$", page, re.MULTILINE)
    written = {name: (kind, text) for name, kind, _, text in rows}

    families = [*text_string_to_metric_families(worker_page), *text_string_to_metric_families(trainer_page)]
    shown = {
        f"{one.name}_total" if one.type == "counter" else one.name: (one.type, one.documentation)
        for one in families
        if one.name.startswith("draftfleet_")
    }

    assert written == shown
    labels = {name: set(re.findall(r"\w+", text)) for name, _, text, _ in rows}
    for family in families:
        for sample in family.samples:
            if family.name.startswith("draftfleet_"):
                assert sample.labels.keys() - {"le"} == labels[re.sub("_(bucket|count|sum)$", "", sample.name)]
    assert all(f"`{rule['alert']}`" in page for rule in RULES)


def test_a_port_that_is_taken_is_said_and_stops_nobody(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    import socket

    monkeypatch.setattr("draftfleet.metrics.AGAIN_S", 0.05)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]

        with caplog.at_level("INFO", logger="draftfleet.metrics"), served("127.0.0.1", port):
            wait_until(lambda: "metrics not served" in caplog.text)
            other.close()
            wait_until(lambda: "metrics served" in caplog.text)
            page = read_page(f"http://127.0.0.1:{port}/metrics")

    assert "process_resident_memory_bytes" in page
    assert caplog.text.count("metrics not served") == 1


def test_the_dashboard_is_one_that_grafana_loads() -> None:
    """The classic model, as file provisioning reads it: docs of Grafana 10 to 13, "Dashboard JSON model"."""
    assert DASHBOARD["id"] is None, "an id belongs to one Grafana; the uid finds it"
    assert re.fullmatch(r"[\w-]{1,40}", DASHBOARD["uid"])
    assert DASHBOARD["title"]
    assert DASHBOARD["schemaVersion"] >= 36
    assert {one["name"] for one in DASHBOARD["templating"]["list"]} == {"datasource", "worker", "server"}
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    source = {"type": "prometheus", "uid": "${datasource}"}
    for panel in PANELS:
        assert panel["type"] in ("timeseries", "stat", "state-timeline")
        assert panel["datasource"] == source
        assert [target["refId"] for target in panel["targets"]] == list("ABCDEFGH"[: len(panel["targets"])])
        assert all(target["datasource"] == source for target in panel["targets"])
        assert panel["fieldConfig"].keys() == {"defaults", "overrides"}


def test_no_panel_lies_on_another() -> None:
    taken: dict[tuple[int, int], str] = {}
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        for x in range(at["x"], at["x"] + at["w"]):
            for y in range(at["y"], at["y"] + at["h"]):
                assert (x, y) not in taken, f"{panel['title']} lies on {taken[x, y]}"
                taken[x, y] = panel["title"]


def test_what_is_provisioned_lies_where_compose_puts_it() -> None:
    compose = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
    mounts = {one.split(":")[1]: ROOT / one.split(":")[0] for one in compose["grafana"]["volumes"] if one[0] == "."}
    provider = yaml.safe_load((DOCKER / "grafana/provisioning/dashboards/draftfleet.yml").read_text())["providers"][0]
    datasource = yaml.safe_load((DOCKER / "grafana/provisioning/datasources/prometheus.yml").read_text())
    scraped = yaml.safe_load((DOCKER / "prometheus/prometheus.yml").read_text())["scrape_configs"]

    assert all(path.exists() for path in mounts.values())
    assert f"{provider['options']['path']}/draftfleet.json" in mounts
    assert datasource["datasources"][0]["url"] == "http://prometheus:9090"
    for job, role in (("draftfleet-worker", "worker"), ("draftfleet-trainer", "trainer")):
        (found,) = [one["dns_sd_configs"][0] for one in scraped if one["job_name"] == job]
        environment = compose[role]["environment"]
        assert found["names"] == [role]
        assert found["port"] == environment[f"DRAFTFLEET_{role.upper()}__METRICS_PORT"]
        assert environment[f"DRAFTFLEET_{role.upper()}__METRICS_ADDRESS"] == "0.0.0.0"


promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool (Debian: prometheus) is not on PATH")


def check(*args: str, stdin: str = "") -> None:
    result = subprocess.run(["promtool", *args], input=stdin, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


@promtool
def test_prometheus_accepts_configuration_alerts_and_every_expression(tmp_path: Path) -> None:
    check("check", "config", str(DOCKER / "prometheus/prometheus.yml"))
    rules = [{"record": f"panel:{n}", "expr": without_macros(expr)} for n, (_, expr) in enumerate(expressions())]
    (tmp_path / "panels.yml").write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    check("check", "rules", str(tmp_path / "panels.yml"))


@promtool
def test_prometheus_finds_no_fault_in_the_pages(worker_page: str, trainer_page: str) -> None:
    for page in (worker_page, trainer_page):
        check("check", "metrics", stdin=page)


@promtool
def test_the_alerts_fire_when_they_should_and_only_then(tmp_path: Path) -> None:
    labels = 'instance="w:1",job="draftfleet-worker"'
    calm = [
        (f'draftfleet_rows_total{{{labels},server="a",outcome="ok"}}', "0+60x90"),
        (f'draftfleet_tokens_total{{{labels},server="a"}}', "0+6000x90"),
        (f'draftfleet_wasted_tokens_total{{{labels},server="a",cause="retried"}}', "0+60x90"),
        (f"draftfleet_rows_waiting{{{labels}}}", "5x90"),
        (f"draftfleet_rows_in_flight{{{labels}}}", "5x90"),
        (f"draftfleet_storage_paused{{{labels}}}", "0x90"),
        (f'draftfleet_server_state{{{labels},server="a",state="away"}}', "0x90"),
        (f"draftfleet_claims_lost_total{{{labels}}}", "0x90"),
        (f"process_start_time_seconds{{{labels}}}", "0x90"),
        (f"up{{{labels}}}", "1x90"),
    ]
    faults = {
        "DraftfleetNoProgress": {"draftfleet_rows_total": "0x90"},
        "DraftfleetStoragePaused": {"draftfleet_storage_paused": "1x90"},
        "DraftfleetTokensWasted": {"draftfleet_wasted_tokens_total": "0+600x90"},
        "DraftfleetServerAway": {"draftfleet_server_state": "1x90"},
        "DraftfleetClaimsLost": {"draftfleet_claims_lost_total": "0x75 1x15"},
        "DraftfleetDown": {"up": "0x90"},
    }

    def at_the_end(name: str, changes: dict[str, str]) -> dict[str, Any]:
        given = [{"series": s, "values": changes.get(s.partition("{")[0], values)} for s, values in calm]
        expr = 'count by (alertname) (ALERTS{alertstate="firing"})'
        fired = [{"labels": f'{{alertname="{name}"}}', "value": 1}] if name else []
        return {
            "interval": "1m",
            "input_series": given,
            "promql_expr_test": [{"expr": expr, "eval_time": "85m", "exp_samples": fired}],
        }

    tests = [at_the_end("", {}), *(at_the_end(name, changes) for name, changes in faults.items())]
    case = {"rule_files": [str(DOCKER / "prometheus/alerts.yml")], "evaluation_interval": "1m", "tests": tests}
    (tmp_path / "case.yml").write_text(yaml.safe_dump(case))

    check("test", "rules", str(tmp_path / "case.yml"))
