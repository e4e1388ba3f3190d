"""`--push-to-hub` against a hub of the test's own, which speaks as much of the protocol as an upload needs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from draftfleet.names import batch_id
from draftfleet.ports import free_port
from draftfleet.records import Prompt, Sample
from draftfleet.runs import Run
from draftfleet.testing.hub import COMMIT, TOKEN, Hub

Push = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub() as server:
        yield server


@pytest.fixture
def push(
    run: Run, make_prompts: Callable[..., list[Prompt]], make_sample: Callable[..., Sample], tmp_path: Path, hub: Hub
) -> Push:
    run.commit(batch_id("train", 0), [make_sample(prompt) for prompt in make_prompts(3)])
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment |= {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HF_HOME": str(tmp_path / "hf")}
    environment |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}

    def call(*args: str, folder: str = "out", **changes: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "draftfleet", "--debug", "export-data", folder, "--run", "run"]
        command += ["--storage", run.storage.url, "--push-to-hub", "me/drafts", *args]
        ended = subprocess.run(
            command, cwd=tmp_path, env=environment | changes, capture_output=True, text=True, timeout=120, check=False
        )
        assert TOKEN not in ended.stdout + ended.stderr
        return ended

    return call


def local(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_new_repository_holds_what_the_folder_holds(push: Push, hub: Hub, tmp_path: Path) -> None:
    ended = push("--private")

    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["hub"] == f"{hub.url}/datasets/me/drafts/commit/{COMMIT}"
    files = hub.repos["me/drafts"]["main"]
    assert {name: raw for name, raw in files.items() if name != ".gitattributes"} == local(tmp_path / "out")
    assert "data/train-00000-of-00001.parquet" in files
    (created,) = hub.created
    assert created.get("private") or created.get("visibility") == "private"
    assert hub.commits == ["run: 3 lines"]
    assert TOKEN.encode() not in b"".join(files.values())


def test_a_repository_that_is_there_is_refused_before_anything_is_written(push: Push, hub: Hub, tmp_path: Path) -> None:
    hub.repos["me/drafts"] = {"main": {"old.txt": b"old"}}

    ended = push()

    assert ended.returncode == 9
    assert f"me/drafts on {hub.url} is there already" in ended.stderr
    assert not (tmp_path / "out").exists()
    assert hub.repos["me/drafts"]["main"] == {"old.txt": b"old"}


def test_overwrite_replaces_the_files_of_a_repository(push: Push, hub: Hub, tmp_path: Path) -> None:
    hub.repos["me/drafts"] = {"main": {"data/train-00000-of-00009.parquet": b"old"}}

    ended = push("--overwrite")

    assert ended.returncode == 0, ended.stderr
    assert hub.repos["me/drafts"]["main"] == local(tmp_path / "out")


def test_a_branch_that_the_repository_does_not_have_is_made(push: Push, hub: Hub, tmp_path: Path) -> None:
    hub.repos["me/drafts"] = {"main": {"old.txt": b"old"}}

    ended = push("--revision", "v2")

    assert ended.returncode == 0, ended.stderr
    assert hub.repos["me/drafts"]["main"] == {"old.txt": b"old"}
    assert hub.repos["me/drafts"]["v2"] == local(tmp_path / "out")
    assert push("--revision", "v2", folder="other").returncode == 9


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"HF_TOKEN": ""}, "HF_TOKEN is not set"),
        ({"HF_TOKEN": "hf_wrongwrongwrong"}, "the hub does not know the token in HF_TOKEN"),
        ({"HF_HUB_OFFLINE": "1"}, "cannot be reached: see the network, HF_ENDPOINT and HF_HUB_OFFLINE"),
        ({"HF_ENDPOINT": f"http://127.0.0.1:{free_port()}"}, "cannot be reached"),
    ],
    ids=["no token", "wrong token", "offline", "no hub"],
)
def test_what_can_be_known_before_is_told_before(
    push: Push, tmp_path: Path, changes: dict[str, str], said: str
) -> None:
    ended = push(**changes)

    assert ended.returncode == 9
    assert said in ended.stderr
    assert "hf_wrong" not in ended.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("begin", "status", "said"),
    [
        ("/api/repos/create", 403, "may not write there"),
        ("/api/datasets/me/drafts/preupload", 403, "may not write there"),
        ("/api/datasets/me/drafts/commit", 409, "somebody else is changing it"),
        ("/datasets/me/drafts.git", 418, "the hub answered 418"),
    ],
)
def test_an_upload_that_is_refused_leaves_the_folder_whole(
    push: Push, hub: Hub, tmp_path: Path, begin: str, status: int, said: str
) -> None:
    hub.refuses[begin] = status

    ended = push()

    assert ended.returncode == 9, ended.stderr
    assert said in ended.stderr
    assert "The export is whole and in out: once this is mended, run it with --overwrite." in ended.stderr
    assert (tmp_path / "out/export.json").exists()
    hub.refuses.clear()
    assert push("--overwrite").returncode == 0


def test_a_name_without_an_owner_is_told(push: Push) -> None:
    assert "name the owner, too, as in ORG/NAME" in push("--push-to-hub", "drafts").stderr
