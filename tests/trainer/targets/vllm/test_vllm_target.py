"""The target behind a server: its states, what it refuses, and what it does when the server errs."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from draftfleet.errors import SettingsError, TargetError
from draftfleet.settings import Settings
from trainer import targets
from trainer.targets import Captured, Row
from trainer.targets.vllm.spool import is_whole

CPU = torch.device("cpu")
LAYERS = [1, 3, 6]

Make = Callable[..., Any]


def load(settings: Settings, layers: list[int] | None = None) -> Any:
    return targets.load(settings, LAYERS if layers is None else layers, CPU)


def left(spool: Path) -> list[str]:
    return sorted(path.name for path in spool.iterdir())


def whole(spool: Path) -> list[Path]:
    """Files that the server has finished."""
    return [file for file in spool.glob("*.safetensors") if is_whole(file)]


def assert_same(captured: list[list[Captured]], expected: list[list[Captured]]) -> None:
    assert [[one.row.key for one in batch] for batch in captured] == [[one.row.key for one in b] for b in expected]
    for a, b in zip(chain(*captured), chain(*expected), strict=True):
        assert a.row is b.row
        for ours, theirs in ((a.hidden, b.hidden), (a.last, b.last)):
            assert ours.shape == theirs.shape
            assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()


def test_states_are_those_of_the_target_in_this_process(
    engine: Any, settings: Make, rows: Make, oracle: Any, spool: Path
) -> None:
    target = load(settings(engine))
    batches = [rows(5, 70, 33), rows(12, 40), rows(7)]

    captured = list(target.capture(batches))

    assert_same(captured, list(oracle.capture(batches)))
    assert target.layers == LAYERS
    for name in ("embedding", "head", "norm_scale"):
        assert torch.equal(getattr(target, name), getattr(oracle, name)), name
    last = captured[0][1].last
    assert torch.allclose(target.logits(last), oracle.logits(last), atol=1e-5)
    assert left(spool) == []


def test_the_last_layer_is_the_state_before_the_final_norm_and_is_asked_for_once(
    start_engine: Make, settings: Make, rows: Make
) -> None:
    target = load(settings(start_engine(layers=[4, 8])), [3, 7])

    (captured,) = next(iter(target.capture([rows(9)])))

    width = captured.last.shape[1]
    assert torch.equal(captured.hidden[:, width:], captured.last)


def test_rows_are_asked_for_ahead_of_the_one_that_is_taken(engine: Any, settings: Make, rows: Make) -> None:
    target = load(settings(engine))
    capture = target.capture([rows(10 + n) for n in range(6)])

    next(capture)
    wait_for(lambda: len(engine.asked) == 6)

    assert len(list(capture)) == 5


def test_a_batch_that_is_there_does_not_wait_for_the_next_to_be_drawn(engine: Any, settings: Make, rows: Make) -> None:
    more = threading.Event()

    def batches() -> Iterator[list[Row]]:
        yield rows(8)
        more.wait(30)
        yield rows(9)

    capture = load(settings(engine)).capture(batches())

    assert len(next(capture)) == 1
    more.set()
    assert len(list(capture)) == 1


def test_what_the_iterator_of_batches_raises_comes_after_the_batches_before_it(
    engine: Any, settings: Make, rows: Make, spool: Path
) -> None:
    def batches() -> Iterator[list[Row]]:
        yield rows(8)
        raise ValueError("no more")

    capture = load(settings(engine)).capture(batches())

    assert len(next(capture)) == 1
    with pytest.raises(ValueError, match="no more"):
        next(capture)
    assert left(spool) == []


def test_the_spool_never_holds_more_than_its_bound_and_a_batch_may_be_larger(
    engine: Any, settings: Make, rows: Make, oracle: Any, spool: Path
) -> None:
    """A row of 64 tokens takes 201 kB: two of them fit."""
    target = load(settings(engine, capture__spool_gb=0.00045, trainer__max_length=64))
    batches = [rows(*[64] * 10), rows(*[60] * 10)]

    captured = []
    for batch in target.capture(batches):
        time.sleep(0.1)  # a trainer that is slower than the server
        captured.append(batch)

    assert_same(captured, list(oracle.capture(batches)))
    assert 2 * 100_000 < max(engine.spool_bytes) <= 450_000
    assert left(spool) == []


def test_a_capture_that_is_left_early_leaves_nothing_behind(
    engine: Any, settings: Make, rows: Make, spool: Path
) -> None:
    capture = load(settings(engine)).capture([rows(10 + n) for n in range(50)])

    next(capture)
    capture.close()

    assert left(spool) == []
    assert len(list(load(settings(engine)).capture([rows(5)]))) == 1


FAULTS = ["500", "dies", "torn", "ids", "short", "nan", "half", "lost"]


@pytest.mark.parametrize("fault", [*FAULTS, "slow"])
def test_one_fault_of_a_server_changes_nothing(
    fault: str, engine: Any, settings: Make, rows: Make, oracle: Any, spool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.targets.vllm.fetching.FILE_S", 1.0)
    target = load(settings(engine))
    engine.faults += ["", fault]
    batches = [rows(12, 40, 23), rows(30)]

    captured = list(target.capture(batches))

    assert_same(captured, list(oracle.capture(batches)))
    assert left(spool) == []


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("ids", r"row-0 came wrong twice: 1 of 12 token ids differ .* position 3: \d+ instead of \d+"),
        ("short", r"row-0 came wrong twice: it has 10 tokens, 12 were asked for: is the prefix cache on"),
        ("torn", r"row-0 came wrong twice: .*cannot be read \(\d+ bytes\)"),
        ("nan", r"row-0 came wrong twice: 1 of 12 positions have values that are not finite, the first is 2"),
        ("half", r"row-0 came wrong twice: its states are torch.bfloat16, those of the first row were torch.float32"),
    ],
)
def test_states_that_are_wrong_twice_end_it_and_say_what_is_wrong(
    fault: str, said: str, engine: Any, settings: Make, rows: Make, spool: Path
) -> None:
    target = load(settings(engine))
    engine.every = fault

    with pytest.raises(TargetError, match=said):
        list(target.capture([rows(12)]))

    assert len(engine.asked) == 2
    assert left(spool) == []


def test_a_disk_that_is_full_is_named(
    engine: Any, settings: Make, rows: Make, spool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = load(settings(engine))
    monkeypatch.setattr("trainer.targets.vllm.spool.Spool.free_bytes", lambda _: 1000)
    engine.every = "torn"

    with pytest.raises(TargetError, match=f"the disk of capture.folder = {spool} is full: 0.00 GB are free"):
        list(target.capture([rows(12)]))


def test_a_server_that_dies_is_waited_for_and_others_go_on(
    start_engine: Make, settings: Make, rows: Make, oracle: Any, spool: Path
) -> None:
    one, two = start_engine(), start_engine()
    target = load(settings(one, two))
    batches = [rows(10 + n, 20 + n) for n in range(10)]
    expected = list(oracle.capture(batches))

    captured = []
    for number, batch in enumerate(target.capture(iter(batches))):
        captured.append(batch)
        if number == 2:
            one.stop()

    assert_same(captured, expected)
    two.stop()
    threading.Timer(0.5, two.start).start()
    assert_same(list(target.capture(batches)), expected)
    assert left(spool) == []


def test_servers_that_stay_away_end_it_with_the_row_and_what_to_do(engine: Any, settings: Make, rows: Make) -> None:
    target = load(settings(engine, capture__ready_timeout_s=0.3))
    engine.stop()

    with pytest.raises(
        TargetError, match=r"no server of capture.servers gave .*capture.ready_timeout_s.* of row row-0"
    ):
        list(target.capture([rows(10)]))


def test_a_row_that_fails_each_time_ends_it_though_others_are_answered(
    start_engine: Make, settings: Make, rows: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.targets.vllm.asking.MOST_TRIES", 3)
    monkeypatch.setattr("trainer.targets.vllm.servers.LONGEST_REST_S", 0.01)
    engine = start_engine()
    engine.kills = 66
    batches = [rows(10 + n) for n in range(5)] + [rows(66)] + [rows(10 + n) for n in range(50)]

    with pytest.raises(TargetError, match=r"row row-0 of 66 tokens failed 3 times, while .* answered others: .* 500"):
        list(load(settings(engine)).capture(batches))


def test_a_row_that_is_refused_keeps_its_place_and_trains_nothing(
    engine: Any, settings: Make, rows: Make, oracle: Any, caplog: pytest.LogCaptureFixture
) -> None:
    target = load(settings(engine, capture__concurrency=1))
    engine.faults += ["", "too long"]
    batch = rows(12, 40, 23)

    ((first, refused, last),) = target.capture([batch])

    assert_same([[first, last]], [[one for one in next(oracle.capture([batch])) if one.row.key != "row-1"]])
    assert refused.row.key == "row-1"
    assert not refused.row.mask.any()
    assert len(refused.row.ids) == len(refused.hidden) == len(refused.last)
    assert "maximum context length is 1024 tokens" in caplog.text


def test_many_rows_refused_end_it(engine: Any, settings: Make, rows: Make) -> None:
    target = load(settings(engine))
    engine.every = "too long"

    with pytest.raises(TargetError, match=r"It is the 11th of 11 rows. Serve the target with a --max-model-len above"):
        list(target.capture([rows(*[10] * 20)]))


def test_a_row_that_one_server_refuses_is_asked_of_another(
    start_engine: Make, settings: Make, rows: Make, oracle: Any
) -> None:
    small, large = start_engine(), start_engine()
    target = load(settings(small, large))
    small.every = "too long"
    batches = [rows(20, 21, 22, 23)]

    assert_same(list(target.capture(batches)), list(oracle.capture(batches)))


def test_ids_outside_the_vocabulary_are_refused_before_they_are_asked_for(engine: Any, settings: Make) -> None:
    row = Row("r", torch.tensor([1, 99_999]), torch.ones(2).bool())

    with pytest.raises(TargetError, match="sample r has token ids from 1 to 99999"):
        list(load(settings(engine)).capture([[row]]))
    assert engine.asked == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"layers": [2, 4, 8]},
            r"states have the shape \(48, 3, \d+\), \(48, 4, \d+\) was asked for.*for another drafter",
        ),
        ({"layers": [2, 4, 8, 7]}, r"it goes on with token \d+, and its last state gives \d+ by the final norm"),
        ({"name": "other", "root": "/models/other"}, r"it serves other, and the target is tiny-target"),
        ({"max_model_len": 256}, r"it takes 256 tokens, .* rows have up to 256"),
        ({"told": ""}, r"answers without kv_transfer_params.hidden_states_path"),
        ({"folder": Path("/tmp")}, r"says that it wrote /tmp/cmpl-.*capture.folder must be the folder"),
    ],
    ids=["layers", "order", "model", "length", "connector", "folder"],
)
def test_a_server_of_another_kind_is_refused_with_the_command_that_is_right(
    change: dict[str, Any], said: str, engine: Any, settings: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("trainer.targets.vllm.fetching.FILE_S", 0.2)
    for name, value in change.items():
        setattr(engine, name, tmp_path if name == "folder" else value)

    with pytest.raises(TargetError, match=said.replace("/tmp/", f"{tmp_path}/")) as raised:
        load(settings(engine))

    assert '"eagle_aux_hidden_state_layer_ids": [2, 4, 7, 8]' in str(raised.value)
    assert "--no-enable-prefix-caching" in str(raised.value)


def test_no_server_no_folder_and_no_room_are_refused(engine: Any, settings: Make) -> None:
    with pytest.raises(SettingsError, match=r"capture.servers is empty"):
        load(settings())
    with pytest.raises(SettingsError, match=r"capture.folder is not set"):
        load(settings(engine, capture__folder=""))
    with pytest.raises(TargetError, match=r"a row of 256 tokens take 0.000\d+ GB, and capture.spool_gb = 1e-05"):
        load(settings(engine, capture__spool_gb=0.00001))
    with pytest.raises(TargetError, match=r"capture.spool_gb = 1e\+09, and .* GB free"):
        load(settings(engine, capture__spool_gb=1e9))
    with pytest.raises(SettingsError, match=r"capture.servers has 'localhost:80'"):
        load(settings(engine, capture__servers=["localhost:80"]))


def test_no_server_that_answers_is_told_with_the_command(engine: Any, settings: Make) -> None:
    engine.stop()

    with pytest.raises(TargetError, match=r"no server of capture.servers answers: .*(?s:.*)vllm serve"):
        load(settings(engine, capture__ready_timeout_s=0.1))


KILLED = """
import sys, torch
from draftfleet.settings import load
from trainer import targets
from trainer.targets import Row
target = targets.load(load(sys.argv[1]), [1, 3, 6], torch.device("cpu"))
rows = [Row(str(n), torch.arange(20 + n), torch.ones(20 + n).bool()) for n in range(30)]
capture = target.capture([[row] for row in rows])
next(capture)
print("ready", flush=True)
sys.stdin.read()
"""


def test_what_a_killed_training_left_is_removed_at_the_next_start_and_nothing_else(
    engine: Any, settings: Make, rows: Make, spool: Path, tmp_path: Path
) -> None:
    file = tmp_path / "settings.toml"
    file.write_text(
        f'run = "r"\n[storage]\nurl = "{tmp_path / "storage"}"\n'
        f'[target]\npath = "{engine.root}"\nmodel = "tiny-target"\n[trainer]\ntarget = "vllm"\nmax_length = 256\n'
        f'[capture]\nservers = ["{engine.url}"]\nfolder = "{spool}"\nspool_gb = 0.01\n'
    )
    child = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(file)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    wait_for(lambda: len(whole(spool)) == 29)
    child.kill()
    child.wait()
    others = ["cmpl-draftfleet-0123456789ab-0-aaaaaa-1-bbbbbb-00000001-0-0a1b2c3d.safetensors", "notes.safetensors"]
    for name in others:
        (spool / name).write_bytes(b"")

    target = load(settings(engine))

    assert left(spool) == sorted(others)
    assert len(list(target.capture([rows(5)]))) == 1


def test_a_second_look_at_the_same_drafter_leaves_the_files_of_the_first(
    engine: Any, settings: Make, rows: Make, spool: Path
) -> None:
    """`draftfleet doctor --check-target`, say, while the drafter is trained."""
    capture = load(settings(engine)).capture([rows(10 + n) for n in range(6)])
    next(capture)
    wait_for(lambda: len(whole(spool)) == 5)

    assert len(list(load(settings(engine)).capture([rows(5)]))) == 1

    assert len(left(spool)) == 2 * 5
    assert len(list(capture)) == 5


def wait_for(condition: Callable[[], bool], timeout_s: float = 30) -> None:
    until = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)
