"""Hidden states on a disk: what is kept, what is never taken, and what happens where there is no room."""

from __future__ import annotations

import json
import logging
import random
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftfleet.errors import RunMissing, StorageUnwritable, TargetError
from draftfleet.names import split_of
from draftfleet.records import Prompt, Sample
from draftfleet.runs import Run
from draftfleet.settings import load
from draftfleet.storage import FileStorage
from trainer import targets
from trainer.targets import Captured, Row
from trainer.targets.cache import CacheTarget, store
from trainer.targets.cache.encoding import bytes_per_token, decode, encode
from trainer.targets.fingerprint import fingerprint

TINY = Path(__file__).parents[3] / "examples" / "tiny-target"
CPU = torch.device("cpu")
LAYERS = [2, 3, 6]
TOKEN_BYTES = 4 * 192 * 2 + 4


@pytest.fixture
def open_cache(tmp_path: Path) -> Callable[..., CacheTarget]:
    """`captures=False`: one that must not load the target."""

    def make(*, layers: list[int] = LAYERS, captures: bool = True, path: Path = TINY, **cache: Any) -> CacheTarget:
        flags = {"target.path": str(path), "trainer.target": "cache", "storage.url": str(tmp_path / "storage")}
        flags |= {"cache.dir": str(tmp_path / "kept"), "storage.min_free_gb": 0}
        target = targets.load(
            load(flags=flags | {f"cache.{name}": value for name, value in cache.items()}), layers, CPU
        )
        assert isinstance(target, CacheTarget)
        if not captures:
            target._open_source = lambda: pytest.fail("the target was loaded")
        return target

    return make


def files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.safetensors"))


def flat(batches: list[list[Captured]]) -> list[Captured]:
    return [one for batch in batches for one in batch]


def assert_equal(ours: list[list[Captured]], theirs: list[list[Captured]]) -> None:
    for one, other in zip(flat(ours), flat(theirs), strict=True):
        assert torch.equal(one.hidden, other.hidden)
        assert torch.equal(one.last, other.last)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8"])
def test_a_later_epoch_reads_what_the_first_was_given_bit_for_bit_and_loads_no_target(
    dtype: str, open_cache: Callable[..., CacheTarget], rows: Callable[..., list[Row]]
) -> None:
    batches = [rows(5, 70, 33), rows(12, 40, seed=1)]
    first = list(open_cache(dtype=dtype).capture(batches))

    target = open_cache(dtype=dtype, captures=False)
    again = list(target.capture([batches[1], batches[0]]))

    assert_equal(again, [first[1], first[0]])
    assert (target.store.counts.read, target.store.counts.captured) == (5, 0)


def test_a_batch_of_which_a_part_is_there_has_only_the_rest_captured(
    open_cache: Callable[..., CacheTarget], rows: Callable[..., list[Row]], make_target: Callable[..., Any]
) -> None:
    known, new = rows(5, 70, 33), rows(12, 40, seed=1)
    target = open_cache(dtype="float32")
    list(target.capture([known]))

    mixed = list(target.capture([[new[0], known[1], new[1], known[0]], known]))

    assert target.store.counts.captured == 5
    alone = list(make_target().capture([[one.row] for one in flat(mixed)]))
    for one, other in zip(flat(mixed), flat(alone), strict=True):
        assert one.row.key == other.row.key
        assert (one.hidden - other.hidden).abs().max() <= 1e-5 * other.hidden.abs().max()


@pytest.mark.parametrize(("dtype", "limit"), [("bfloat16", 2**-8), ("float8", 2**-4)])
def test_what_a_form_loses_of_a_number_is_its_rounding_and_no_more(
    dtype: str, limit: float, open_cache: Callable[..., CacheTarget], rows: Callable[..., list[Row]],
    make_target: Callable[..., Any],
) -> None:  # fmt: skip
    batch = rows(70)
    [exact], [kept] = next(make_target().capture([batch])), next(open_cache(dtype=dtype).capture([batch]))

    for ours, theirs in ((kept.hidden.reshape(-1, 192), exact.hidden.reshape(-1, 192)), (kept.last, exact.last)):
        # E4M3 has three bits of fraction down to the 2^-14th part of the largest number of a state, and fewer below.
        floor = theirs.abs().amax(-1, keepdim=True) * 2**-14
        assert ((ours - theirs).abs() <= limit * torch.maximum(theirs.abs(), floor)).all()
        assert (ours - theirs).norm() <= limit / 1.5 * theirs.norm()
        assert (ours - theirs).norm() > 0


def test_float8_keeps_a_token_of_huge_states_from_spoiling_its_neighbours_and_zeros_stay_zeros() -> None:
    states = torch.randn(3, 2, 64)
    states[1] *= 1e6
    states[2] = 0

    back = decode(encode(states, "float8"), torch.float32)

    assert ((back - states).norm(dim=-1) <= 2**-4 * states.norm(dim=-1)).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8"])
def test_the_bytes_of_a_token_are_those_of_the_file_without_its_header(
    dtype: str, open_cache: Callable[..., CacheTarget], rows: Callable[..., list[Row]], tmp_path: Path
) -> None:
    list(open_cache(dtype=dtype).capture([rows(500)]))

    [file] = files(tmp_path / "kept")
    assert 0 < file.stat().st_size - 500 * bytes_per_token(dtype, 4, 192) < 1000


def test_another_layer_another_form_and_another_target_have_entries_of_their_own(
    open_cache: Callable[..., CacheTarget], rows: Callable[..., list[Row]], tmp_path: Path
) -> None:
    other = shutil.copytree(TINY, tmp_path / "finetuned")
    weights = load_file(other / "model.safetensors")
    weights["model.layers.4.mlp.up_proj.weight"] += 0.01
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    batch = rows(30)
    first = next(open_cache().capture([batch]))

    for number, changes in enumerate(({"layers": [2, 3, 5]}, {"dtype": "float8"}, {"path": other}), start=2):
        target = open_cache(**changes)
        captured = next(target.capture([batch]))
        assert target.store.counts.captured == 1
        assert not torch.equal(captured[0].hidden, first[0].hidden)
        assert len(files(tmp_path / "kept")) == number


def test_a_copy_of_a_target_elsewhere_is_the_same_target(tmp_path: Path) -> None:
    copy = shutil.copytree(TINY, tmp_path / "copy")
    assert fingerprint(str(copy), "hf") == fingerprint(str(TINY), "hf") != fingerprint(str(TINY), "vllm")

    (copy / "config.json").write_text(json.dumps(json.loads((copy / "config.json").read_text()) | {"rms_norm_eps": 1}))
    assert fingerprint(str(copy)) != fingerprint(str(TINY))

    (copy / "model.safetensors").unlink()
    with pytest.raises(TargetError, match=r"cannot be told apart .*safetensors"):
        fingerprint(str(copy))


def _cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def _empty(file: Path) -> None:
    file.write_bytes(b"")


def _zeroed(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-4096:] = bytes(4096)
    file.write_bytes(data)


def _of_other_ids(file: Path) -> None:
    tensors = load_file(file)
    from safetensors import safe_open

    with safe_open(file, framework="pt") as opened:
        metadata = opened.metadata()
    tensors["ids"][3] += 1
    save_file(tensors, file, metadata=metadata)


def _of_another_target(file: Path) -> None:
    save_file(load_file(file), file, metadata={"target": "another"})


@pytest.mark.parametrize("damage", [_cut, _empty, _zeroed, _of_other_ids, _of_another_target])
def test_what_is_torn_or_foreign_is_captured_anew_and_mended(
    damage: Callable[[Path], None], open_cache: Callable[..., CacheTarget], rows: Callable[..., list[Row]],
    tmp_path: Path, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    batch = rows(30, 50)
    first = list(open_cache().capture([batch]))
    damage(files(tmp_path / "kept")[0])

    target = open_cache()
    again = list(target.capture([batch]))

    assert (target.store.counts.damaged, target.store.counts.captured) == (1, 1)
    assert "captured anew" in caplog.text
    for one, other in zip(flat(again), flat(first), strict=True):
        assert (one.last - other.last).abs().max() <= 2**-7 * other.last.abs().max()
    assert list(open_cache(captures=False).capture([batch]))


def test_rows_beyond_the_quota_are_captured_in_each_epoch_said_once_and_counted(
    open_cache: Callable[..., CacheTarget], rows: Callable[..., list[Row]], caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:  # fmt: skip
    caplog.set_level(logging.INFO)
    epochs = [[rows(40, 41, epoch=epoch), rows(42, 43, seed=1, epoch=epoch)] for epoch in (0, 1, 2)]
    target = open_cache(quota_gb=(2.5 * 42 * TOKEN_BYTES + 2000) / 1e9)

    captured = [list(target.capture(batches)) for batches in epochs]

    assert_equal(captured[1], captured[0])
    assert_equal(captured[2], captured[0])
    assert len(files(tmp_path / "kept")) == 2
    assert caplog.text.count("hidden states not kept any more") == 1
    assert "epoch=0 read=0 captured=4 without_room=2" in caplog.text
    assert "epoch=1 read=2 captured=2 without_room=2" in caplog.text
    assert store.size_of(tmp_path / "kept") <= target.store.quota_bytes


def test_a_disk_that_has_no_room_ends_no_training(
    open_cache: Callable[..., CacheTarget], rows: Callable[..., list[Row]], monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    def refuse(path: Path, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    target = open_cache()
    monkeypatch.setattr(Path, "write_bytes", refuse)

    captured = list(target.capture([rows(20, 30)]))

    assert len(captured[0]) == 2
    assert target.store.counts.without_room == 2
    assert caplog.text.count("No space left") == 1
    assert files(tmp_path / "kept") == []


def test_a_folder_that_cannot_be_written_is_named_with_what_to_set(
    open_cache: Callable[..., CacheTarget], tmp_path: Path
) -> None:
    (tmp_path / "kept").write_text("a file")

    with pytest.raises(StorageUnwritable, match=r"cannot be written: .*cache\.dir"):
        open_cache()


def test_two_that_fill_one_folder_at_the_same_time_leave_whole_files(
    open_cache: Callable[..., CacheTarget], rows: Callable[..., list[Row]], tmp_path: Path
) -> None:
    batches = [rows(20 + number, seed=number) for number in range(12)]
    both = [open_cache(), open_cache()]
    for one in both:
        one._source = one._open_source()  # transformers loads one model at a time
    threads = [threading.Thread(target=lambda one=one: list(one.capture(batches))) for one in both]

    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(files(tmp_path / "kept")) == 12
    assert list(tmp_path.rglob("*/.*")) == []
    assert len(list(open_cache(captures=False).capture(batches))) == 12


# -- before the first is kept


@pytest.fixture
def sampled(tmp_path: Path) -> Run:
    """A run of 6 shards, 4 rows each, with one held-out shard."""
    run = Run.create(FileStorage(tmp_path / "storage"), "r", {"target.model": "t"}, {})
    dice = random.Random(0)
    for number in range(6):
        batch = f"{'heldout' if number == 5 else 'train'}-{number:06d}"
        prompts = [Prompt(f"{batch}-{row}", split_of(batch), [{"role": "user", "content": "?"}]) for row in range(4)]
        run.write_prompts(batch, prompts)
        answers = [[dice.randrange(2048) for _ in range(dice.randrange(20, 90))] for _ in prompts]
        run.commit(
            batch,
            [
                Sample(
                    run_id=run.run_id, run="r", batch=batch, row_key=prompt.row_key, prompt_id=prompt.prompt_id,
                    split=prompt.split, messages=prompt.messages, outcome="ok", prompt_token_ids=[1, 2, 3],
                    token_ids=answer, ids_source="engine", completion_tokens=len(answer),
                )
                for prompt, answer in zip(prompts, answers, strict=True)
            ],
        )  # fmt: skip
    return run


def tokens_to_train_on(run: Run, max_length: int) -> int:
    samples = [one for batch in run.done() if split_of(batch) == "train" for one in run.read_samples(batch)]
    return sum(min(len(one.prompt_token_ids + one.token_ids), max_length) for one in samples)


def flags_of(run: Run, **cache: Any) -> dict[str, Any]:
    flags = {"target.path": str(TINY), "trainer.target": "cache", "run": "r", "storage.url": run.storage.url}
    return flags | {"storage.min_free_gb": 0} | {f"cache.{name}": value for name, value in cache.items()}


def test_the_estimate_is_the_tokens_of_the_rows_there_are_as_long_as_they_are_cut(
    sampled: Run, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    tokens = tokens_to_train_on(sampled, 50)

    targets.load(load(flags=flags_of(sampled) | {"trainer.max_length": 50}), LAYERS, CPU)

    assert f"tokens={tokens} bytes_per_token={TOKEN_BYTES} gb={tokens * TOKEN_BYTES / 1e9:.3f}" in caplog.text
    assert (Path(sampled.storage.url.removeprefix("file://")) / "r" / "hidden-states").is_dir()


def test_what_would_exceed_the_quota_is_refused_with_the_numbers_and_what_to_do(sampled: Run) -> None:
    tokens = tokens_to_train_on(sampled, 4096)
    needed = tokens * TOKEN_BYTES / 1e9

    with pytest.raises(TargetError) as refused:
        targets.load(load(flags=flags_of(sampled, quota_gb=needed / 2)), LAYERS, CPU)

    said = str(refused.value)
    for part in (f"the {tokens} tokens", f"{needed:.3f} GB", f"{TOKEN_BYTES} bytes a token as bfloat16", "5 of 5"):
        assert part in said
    for knob in ("cache.quota_gb = ", "cache.dtype = float8", "trainer.layers", "trainer.target = hf"):
        assert knob in said
    halved = needed / TOKEN_BYTES * bytes_per_token("float8", 4, 192)
    targets.load(load(flags=flags_of(sampled, quota_gb=halved * 1.01 + 1e-6, dtype="float8")), LAYERS, CPU)


def test_a_disk_that_is_too_small_is_refused_before_it_is_full(sampled: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9, 1000))

    with pytest.raises(TargetError, match=r"GB free, of which storage\.min_free_gb = 0 stay: set cache\.dir"):
        targets.load(load(flags=flags_of(sampled)), LAYERS, CPU)


def test_one_that_was_begun_goes_on_though_its_run_has_outgrown_the_quota(
    sampled: Run, rows: Callable[..., list[Row]]
) -> None:
    list(targets.load(load(flags=flags_of(sampled)), LAYERS, CPU).capture([rows(20)]))

    target = targets.load(load(flags=flags_of(sampled, quota_gb=1e-6)), LAYERS, CPU)

    assert len(next(iter(target.capture([rows(20, 30)])))) == 2


def test_a_run_that_is_not_there_is_named_unless_a_folder_is(tmp_path: Path) -> None:
    flags = {"target.path": str(TINY), "trainer.target": "cache", "storage.url": str(tmp_path)}
    with pytest.raises(RunMissing):
        targets.load(load(flags=flags), LAYERS, CPU)
