"""What is refused, by name, before anything is touched."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from draftfleet.embedded import Embedded
from draftfleet.errors import DataError, QueueError, RunConflict, RunMissing, SettingsError
from draftfleet.runs import Run
from draftfleet.settings import Settings
from draftfleet.storage import FileStorage
from producer.produce import produce

Configure = Callable[..., Settings]
Questions = Callable[..., list[str]]
Write = Callable[[Path, list[str]], Path]
TARGET = Path(__file__).parents[3] / "examples" / "tiny-target"


def test_other_content_settings_are_refused_one_by_one_and_nothing_is_touched(
    configure: Configure, storage: FileStorage, tmp_path: Path, questions: Questions, write: Write
) -> None:
    data = write(tmp_path / "data.jsonl", questions(10))
    produce(configure(data), progress=False)
    run = Run.open(storage, "run")
    sealed, batches = run.sealed(), run.batches()

    with pytest.raises(RunConflict) as caught:
        produce(
            configure(data, producer__batch_size=9, sampling__max_tokens=7, sampling__extra_body={"top_k": 5}),
            progress=False,
        )

    assert "producer.batch_size: the run has 8, now 9" in str(caught.value)
    assert "sampling.max_tokens: the run has 8192, now 7" in str(caught.value)
    assert "sampling.extra_body: the run has {}, now {'top_k': 5}" in str(caught.value)
    assert (run.sealed(), run.batches()) == (sealed, batches)


def test_a_node_without_the_tokenizer_may_go_on_with_a_run_that_has_its_fingerprint(
    configure: Configure, storage: FileStorage, tmp_path: Path, questions: Questions, write: Write
) -> None:
    data = write(tmp_path / "data.jsonl", questions(10))
    produce(configure(data, target__path=str(TARGET)), progress=False)
    pinned = Run.open(storage, "run").info.content["target.fingerprint"]

    for path in ("", "nobody/nothing"):
        assert produce(configure(data, target__path=path), progress=False).already == 10

    assert Run.open(storage, "run").info.content["target.fingerprint"] == pinned


@pytest.mark.parametrize("path", ["/nowhere/target", "./nowhere", "../nowhere/target", "~/nowhere/target"])
def test_a_path_of_a_target_that_is_not_there_is_refused_and_leaves_no_run(
    configure: Configure, storage: FileStorage, tmp_path: Path, path: str, questions: Questions, write: Write
) -> None:
    data = write(tmp_path / "data.jsonl", questions(10))

    with pytest.raises(SettingsError, match=re.escape(f"target.path = {path} is not there")):
        produce(configure(data, target__path=path), progress=False)

    with pytest.raises(RunMissing):
        Run.open(storage, "run")


def test_a_tokenizer_that_the_run_cannot_be_compared_with_is_said(
    configure: Configure,
    storage: FileStorage,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    questions: Questions,
    write: Write,
) -> None:
    data = write(tmp_path / "data.jsonl", questions(10))
    produce(configure(data), progress=False)
    assert caplog.messages == []

    produce(configure(data, target__path=str(TARGET)), progress=False)

    assert [message.partition(" run=")[0] for message in caplog.messages] == ["target fingerprint not compared"]
    assert Run.open(storage, "run").info.content["target.fingerprint"] is None


def test_wrong_data_leaves_no_run_behind_and_an_existing_one_as_it_was(
    configure: Configure, storage: FileStorage, tmp_path: Path, questions: Questions, write: Write
) -> None:
    useless = write(tmp_path / "useless.jsonl", ['{"text": "Why?"}\n'])
    with pytest.raises(DataError, match="has none of the columns"):
        produce(configure(useless), progress=False)
    with pytest.raises(RunMissing):
        Run.open(storage, "run")

    produce(configure(write(tmp_path / "data.jsonl", questions(10))), progress=False)
    run = Run.open(storage, "run")
    sealed = run.sealed()
    with pytest.raises(DataError, match="has none of the columns"):
        produce(configure(useless), progress=False)

    assert run.sealed() == sealed
    assert produce(configure(tmp_path / "data.jsonl"), progress=False).already == 10


def test_a_wrong_source_of_a_mixture_leaves_no_run_behind(
    configure: Configure, storage: FileStorage, tmp_path: Path, questions: Questions, write: Write
) -> None:
    good, useless = (
        write(tmp_path / "good.jsonl", questions(10)),
        write(tmp_path / "useless.jsonl", ['{"text": "?"}\n']),
    )
    sources = [{"data": str(good), "weight": 9}, {"data": str(useless), "weight": 1}]

    with pytest.raises(DataError, match=r"useless\.jsonl has none of the columns"):
        produce(configure("", producer__sources=sources), progress=False)
    with pytest.raises(RunMissing):
        Run.open(storage, "run")
    report = produce(configure("", producer__sources=sources[:1]), progress=False)

    assert (report.lines, report.prompts) == (10, 10)


def test_what_is_not_set_and_a_redis_that_is_away_are_said(
    configure: Configure, redis_server: Embedded, tmp_path: Path, questions: Questions, write: Write
) -> None:
    data = write(tmp_path / "data.jsonl", questions(3))

    with pytest.raises(SettingsError, match=r"producer\.data is not set"):
        produce(configure(""), progress=False)
    with pytest.raises(SettingsError, match=r"target\.model is not set"):
        produce(configure(data, target__model=""), progress=False)
    redis_server.stop()
    with pytest.raises(QueueError, match=r"does not answer: .*[^.]\. Start it"):
        produce(configure(data), progress=False)
