"""Dead letters: which are found, what is shown of them, and what may be done with them."""

from __future__ import annotations

import json
import re
import shlex
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from draftfleet import cli, dead
from draftfleet.errors import BadRequest, DraftfleetError, RunConflict, SettingsError, Transient
from draftfleet.letters import EVERY, KINDS, Filter, find, since
from draftfleet.names import batch_id, parts_of
from draftfleet.queue import connect, queued
from draftfleet.records import Prompt, Sample
from draftfleet.runs import Run
from draftfleet.settings import Settings, environment

MakePrompts = Callable[..., list[Prompt]]
MakeSample = Callable[..., Sample]
OLD = Path(__file__).with_name("written_by_0_1")
PAGE = Path(__file__).parents[2] / "docs/dead-letters.md"

SAID: list[dict[str, Any]] = [
    {"error_kind": "bad_request", "error_status": 400, "error": "it has 9000 tokens", "server": "http://a:8000"},
    {"error_kind": "transient", "error_status": 500, "error": "no answer in 6 tries", "server": "http://b:8000"},
    {"error_kind": "crash", "error": "3 servers ended", "server": "http://b:8000"},
    {"error": "a shard of 0.1.0", "error_status": 404, "server": "http://a:8000"},
]


@pytest.fixture
def bad(run: Run, make_prompts: MakePrompts, make_sample: MakeSample) -> Run:
    """12 prompts: a shard with the failures of SAID, a shard without any, a split batch with a parked row."""
    for number in range(3):
        run.write_prompts(batch_id("train", number), make_prompts(4, start=4 * number))
    first, sound, split = (batch_id("train", number) for number in range(3))
    rows = run.read_prompts(first)
    failed = [
        make_sample(row, first, outcome="failed", completion_tokens=-1, started_at=time.time(), **said)
        for row, said in zip(rows, SAID, strict=True)
    ]
    run.commit(first, failed)
    run.commit(sound, [make_sample(row, sound) for row in run.read_prompts(sound)])
    run.split(split, 4)
    parked, *others = parts_of(split, 4)
    fields: dict[str, Any] = {"outcome": "failed", "error_kind": "worker", "error": "workers ended"}
    run.bury(parked, make_sample(run.read_prompts(parked)[0], parked, **fields))
    for part in others:
        run.commit(part, [make_sample(row, part) for row in run.read_prompts(part)])
    run.seal({"prompts": 12})
    return run


def draftfleet(settings: Settings, *args: str) -> Result:
    """The command line, in this process."""
    return CliRunner().invoke(cli.app, args, env=environment(settings))


def kinds(run: Run, **fields: Any) -> list[str]:
    return [letter.kind for letter in find(run, Filter(**fields))]


def test_what_version_0_1_wrote_is_read_and_its_errors_get_a_kind(run: Run) -> None:
    run.storage.put("run/samples/train-000000.parquet", (OLD / "train-000000.parquet").read_bytes())
    run.storage.put("run/partial/node-1-000000.jsonl", (OLD / "node-1-000000.jsonl").read_bytes())

    from_shard = run.read_samples("train-000000")

    assert [sample.error_kind for sample in from_shard] == [None] * 3
    assert [sample.outcome for sample in from_shard] == ["ok", "failed", "failed"]
    assert run.read_partial("node-1-000000.jsonl") == from_shard
    assert kinds(run) == ["bad_request", "unknown"]


def test_the_kind_of_an_error_is_that_of_its_class_unless_it_knows_better() -> None:
    assert BadRequest("no", status=400).kind == "bad_request"
    assert Transient("no").kind == "transient"
    assert Transient("no", status=200, kind="unusable").kind == "unusable"
    assert {"bad_request", "transient", "crash", "worker", "unusable"} < KINDS.keys()


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({}, ["bad_request", "transient", "crash", "bad_request", "worker"]),
        ({"kind": ("crash", "worker")}, ["crash", "worker"]),
        ({"status": 500}, ["transient"]),
        ({"server": "//b:"}, ["transient", "crash"]),
        ({"contains": "tokens"}, ["bad_request"]),
        ({"batch": "train-000002"}, ["worker"]),
        ({"batch": "train-000002.0000"}, ["worker"]),
        ({"batch": "train-000002.0001"}, []),
        ({"split": "heldout"}, []),
        ({"since": 1.0}, ["bad_request", "transient", "crash", "bad_request"]),
        ({"since": 4e9}, []),
        ({"server": "//b:", "status": 500}, ["transient"]),
    ],
    ids=str,
)
def test_a_filter_leaves_the_letters_that_fit_all_of_it(bad: Run, fields: dict[str, Any], found: list[str]) -> None:
    assert kinds(bad, **fields) == found


def test_only_shards_whose_counts_say_that_a_row_failed_are_read(bad: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    original = Run.read_samples
    monkeypatch.setattr(Run, "read_samples", lambda self, batch: read.append(batch) or original(self, batch))

    assert len(list(find(bad))) == 5
    assert "train-000000" in read
    assert "train-000001" not in read


def test_a_damaged_shard_is_the_dead_letter_of_its_batch(bad: Run) -> None:
    bad.storage.put("run/samples/train-000001.parquet", b"PAR1 torn")

    [letter] = find(bad, Filter(kind=("unreadable",)))

    assert letter.name == "train-000001"
    assert "verify run --repair" in letter.message


def test_a_filter_that_can_fit_nothing_is_refused_with_what_is_allowed() -> None:
    with pytest.raises(SettingsError, match="--kind krash: no such kind; allowed are bad_request, transient"):
        Filter(kind=("krash",))
    with pytest.raises(SettingsError, match="--since yesterday: write 90s, 30m, 2h or 7d"):
        since("yesterday")
    assert since("2h") == pytest.approx(time.time() - 7200, abs=60)
    assert since("2026-07-31T12:00+00:00") == 1785499200


def test_the_list_shows_some_and_counts_all_by_kind_with_an_example(
    settings: Settings, bad: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    dead.show_list(settings, EVERY, limit=1, as_json=False)
    table = capsys.readouterr().out
    dead.show_list(settings, EVERY, limit=None, as_json=True)
    lines = capsys.readouterr()

    assert "5 such dead letters, 1 shown" in table
    assert re.search(r"2 bad_request: the server refused the row; as \w{12} in train-000000: it has 9000 tokens", table)
    letters = [json.loads(line) for line in lines.out.splitlines()]
    assert [letter["kind"] for letter in letters] == kinds(bad)
    assert letters[0].keys() == {
        *("run", "batch", "row_key", "prompt_id", "split", "kind"),
        *("status", "server", "worker", "attempt", "time", "message"),
    }
    assert "5 such dead letters, 5 shown" in lines.err
    assert "Question" not in table + lines.out + lines.err


def test_one_letter_is_shown_whole_with_its_prompt(
    settings: Settings, bad: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    [letter] = find(bad, Filter(kind=("crash",)))

    dead.show_one(settings, letter.row_key[:10])

    shown = capsys.readouterr().out
    assert letter.row_key in shown
    assert "Question 2?" in shown
    with pytest.raises(DraftfleetError, match="5 dead letters begin with"):
        dead.show_one(settings, "")
    with pytest.raises(DraftfleetError, match="has no dead letter zzz"):
        dead.show_one(settings, "zzz")


def test_a_dry_revival_makes_nothing_and_a_real_one_fills_the_queue(settings: Settings, bad: Run) -> None:
    client = connect(settings)

    dry = dead.revive(settings, Filter(kind=("crash", "worker", "transient")), every=False, dry_run=True)
    after_dry = bad.batches(), queued(client, "tiny")
    real = dead.revive(settings, Filter(kind=("crash", "worker", "transient")), every=False, dry_run=False)

    assert dry["rows"] == real["rows"] == 3
    assert after_dry == ([batch_id("train", number) for number in range(3)], 0)
    # Two rows that may end their holder go one by one, the other one in a batch.
    assert queued(client, "tiny") == 3
    assert kinds(bad) == ["bad_request", "bad_request"]
    assert dead.revive(settings, EVERY, every=True, dry_run=True)["rows"] == 2


def test_a_revival_needs_to_be_told_which_and_a_run_that_is_not_cancelled(settings: Settings, bad: Run) -> None:
    with pytest.raises(SettingsError, match="--all"):
        dead.revive(settings, EVERY, every=False, dry_run=False)
    bad.storage.put("run/control.json", json.dumps({"state": "cancelled"}).encode())
    with pytest.raises(RunConflict, match="run run is cancelled"):
        dead.revive(settings, EVERY, every=True, dry_run=False)
    assert len(bad.batches()) == 3


def test_the_exported_rows_are_a_data_set_that_a_producer_reads(settings: Settings, bad: Run, tmp_path: Path) -> None:
    file = tmp_path / "dead.jsonl"

    said = dead.export(settings, Filter(server="//a:"), str(file))
    made = draftfleet(settings, "produce", str(file), "--run", "second")

    assert said == {"rows": 2, "file": str(file)}
    assert json.loads(file.read_text().splitlines()[0])["error"]["kind"] == "bad_request"
    report = json.loads(made.stdout)
    assert (report["lines"], report["new"], report["malformed"], report["heldout"]) == (2, 2, 0, 0)


def test_a_producer_that_comes_again_is_not_misled_by_batches_that_ask_again(
    settings: Settings, run: Run, tmp_path: Path, make_sample: MakeSample
) -> None:
    """Its numbers go on where they were, and no prompt is counted twice."""
    data = tmp_path / "data.jsonl"
    lines = [json.dumps({"prompt": f"Question {number}?"}) + "\n" for number in range(6)]

    def produce(count: int) -> dict[str, Any]:
        data.write_text("".join(lines[:count]))
        return json.loads(draftfleet(settings, "produce", str(data), "--run", "other", "--heldout", "0").stdout)

    produce(4)
    other = Run.open(run.storage, "other")
    [batch] = other.batches()
    other.commit(batch, [make_sample(row, batch, outcome="failed") for row in other.read_prompts(batch)])
    asked = settings.model_copy(update={"run": "other"})
    dead.revive(asked, EVERY, every=True, dry_run=False)
    report = produce(6)

    assert other.batches() == ["train-000000", "train-000001", "train-again-000000"]
    assert (report["new"], report["already"], report["run_prompts"]) == (2, 4, 6)


def test_the_examples_of_the_page_run(settings: Settings, bad: Run) -> None:
    [block] = re.findall(r"^```bash\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    calls = [shlex.split(line, comments=True)[1:] for line in block.splitlines() if line]
    [letter] = find(bad, Filter(kind=("crash",)))

    for call in calls:
        args = [letter.row_key[:12] if word == "b05c5aa0d5b4" else word for word in call]
        done = draftfleet(settings, *args)
        assert done.exit_code == 0, (call, done.output)
    assert len(calls) >= 7
    assert not list(find(bad))
