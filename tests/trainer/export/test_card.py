"""The model card, and `draftfleet export --push-to-hub` against a hub of the test's own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from draftfleet.runs import Run
from draftfleet.settings import Settings
from draftfleet.testing.hub import COMMIT, TOKEN, Hub
from trainer.export import FORMATS, export

NAMED = ("--set", "export.target_name=Qwen/Qwen3-8B")

EVALUATION: dict[str, Any] = {
    "checkpoint": "step-000200",
    "k": 3,
    "prompts": 64,
    "acceptance_length": 2.9512,
    "acceptance_per_position": [0.85, 0.65, 0.45],
    "lossless": True,
    "domains": {
        "code": {
            "acceptance_length": 3.1,
            "interval": [2.95, 3.25],
            "drafts": 1234,
            "acceptance_per_position": [0.9, 0.7, 0.5],
        }
    },
}

BENCHED = [(1500.0, 2.75), (1000.0, None)]
"""Tokens/s and acceptance length, with the drafter and without."""


def front(card: str) -> dict[str, Any]:
    return yaml.safe_load(card.split("---\n")[1])


def card_of(settings: Settings, format_name: str = "vllm", **given: Any) -> str:
    return (export(settings, [format_name], **given)[format_name] / "README.md").read_text()


@pytest.fixture
def say(settings: Settings, run: Run) -> Callable[[str, dict[str, Any]], None]:
    """Put a JSON file into the drafter's folder."""
    return lambda name, said: run.storage.put(
        f"{run.name}/drafters/{settings.trainer.drafter}/{name}", json.dumps(said).encode()
    )


@pytest.mark.parametrize("algorithm", ["eagle3", "dflash"])
@pytest.mark.parametrize("format_name", FORMATS)
def test_a_card_says_what_the_drafter_is_and_how_it_is_served(
    settings: Settings, make: Any, put: Any, target: Path, algorithm: str, format_name: str
) -> None:
    put(make(algorithm, layers=[1, 3, 5]))

    card = card_of(settings, format_name)

    assert front(card)["license"] == "apache-2.0"  # the target's
    assert {"speculative-decoding", algorithm, format_name} <= set(front(card)["tags"])
    assert "[1, 3, 5]" in card
    assert "[2, 4, 6]" in card
    assert "FOLDER" in card
    assert "toy-target, 8 layers" in card
    assert "Not measured." in card
    assert str(target.parent) not in card


def test_the_acceptance_table_has_all_prompts_and_each_domain(
    settings: Settings, put: Any, say: Callable[[str, dict[str, Any]], None]
) -> None:
    put()
    say("evaluation.json", EVALUATION)

    card = card_of(settings)

    assert "3 tokens drafted per pass, 64 held-out prompts" in card
    assert "between 1 and 4" in card
    assert "| all | 2.951 |  |  | 0.850 / 0.650 / 0.450 |" in card
    assert "| source: code | 3.100 | 2.95 to 3.25 | 1,234 | 0.900 / 0.700 / 0.500 |" in card
    assert "All answers were those of the target alone" in card
    assert "Measured on" not in card


def test_of_sampled_answers_a_card_says_the_temperature_and_not_that_they_are_the_target_s(
    settings: Settings, put: Any, say: Callable[[str, dict[str, Any]], None]
) -> None:
    put()
    say("evaluation.json", EVALUATION | {"temperature": 0.7, "lossless": None, "lossless_prompts": None})

    card = card_of(settings)

    assert "answers sampled at temperature 0.7" in card
    assert "token for token" not in card


def test_figures_of_another_checkpoint_are_marked(
    settings: Settings, put: Any, say: Callable[[str, dict[str, Any]], None]
) -> None:
    put(step=400)
    say("evaluation.json", EVALUATION)

    assert "**Measured on step-000200, not on step 400, which this folder holds.**" in card_of(settings)


def test_what_it_gains_in_a_server_is_told_where_it_was_measured(
    settings: Settings, put: Any, say: Callable[[str, dict[str, Any]], None]
) -> None:
    put()
    speeds = [{"tokens_per_s": {"median": value}, "acceptance_length": length} for value, length in BENCHED]
    level = {"concurrency": 8, "with_drafter": speeds[0], "without": speeds[1], "speedup": {"median": 1.5}}
    alone = {"concurrency": 32, "with_drafter": speeds[0], "without": None, "speedup": None}
    told = {"max_tokens": 256, "temperature": 0.0, "repeat": 3, "at": "2026-11-30T22:00:00+00:00", "dialect": "vllm"}
    say("bench.json", told | {"levels": [level, alone], "error": None, "with_url": "http://10.0.0.7:8000"})

    card = card_of(settings)

    assert "In vLLM on 2026-11-30: answers of 256 tokens at most, temperature 0.0, median of 3." in card
    assert "| 8 | 1,500 | 1,000 | x1.50 | 2.750 |" in card
    assert "| 32 | 1,500 | – | – | 2.750 |" in card
    assert "10.0.0.7" not in card


def test_settings_and_data_are_told_without_places_of_this_machine(
    settings: Settings, put: Any, say: Callable[[str, dict[str, Any]], None]
) -> None:
    put()
    pinned = {"trainer": {"lr": 1e-4, "device": "cuda:1"}, "eagle3": {"start_from": "/home/me/old"}}
    say("drafter-settings.json", pinned | {"target": {"path": "/home/me/target"}})
    say("progress.json", {"trained_tokens": 1234567})

    card = card_of(settings)

    assert "| `trainer.lr` | 0.0001 |" in card
    assert "1,234,567 tokens with a loss" in card
    assert "/home/me" not in card
    assert "cuda:1" not in card


@pytest.mark.parametrize(
    ("given", "of_target", "licence"),
    [
        ({}, "---\nlicense: apache-2.0\n---\n", "apache-2.0"),
        ({}, "# no front matter\n", "unknown"),
        ({"license": "mit"}, "---\nlicense: apache-2.0\n---\n", "mit"),
    ],
)
def test_the_licence_is_the_one_that_is_given_else_the_target_s_else_not_known(
    settings: Settings, put: Any, target: Path, given: dict[str, str], of_target: str, licence: str
) -> None:
    put()
    (target / "README.md").write_text(of_target)

    assert front(card_of(settings, **given))["license"] == licence


def test_a_target_of_the_hub_is_named_as_the_base_model(settings: Settings, put: Any) -> None:
    put()
    named = settings.export.model_copy(update={"target_name": "Qwen/Qwen3-8B"})

    card = card_of(settings.model_copy(update={"export": named}))

    assert front(card)["base_model"] == "Qwen/Qwen3-8B"
    assert "vllm serve Qwen/Qwen3-8B" in card


# -- the hub


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub() as server:
        yield server


@pytest.fixture
def push(settings: Settings, put: Any, tmp_path: Path, hub: Hub) -> Callable[..., subprocess.CompletedProcess[str]]:
    put()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment |= {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HF_HOME": str(tmp_path / "hf")}
    environment |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}

    def call(*args: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "draftfleet", "export", "--run", settings.run, *NAMED, *args]
        command += ["--storage", settings.storage.url]
        ended = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200, check=False
        )
        assert TOKEN not in ended.stdout + ended.stderr
        return ended

    return call


def test_a_model_on_the_hub_holds_what_the_folder_holds(push: Any, hub: Hub) -> None:
    ended = push("--format", "vllm", "--push-to-hub", "me/drafter", "--private")

    assert ended.returncode == 0, ended.stderr
    said = json.loads(ended.stdout)
    assert said["hub"] == f"{hub.url}/me/drafter/commit/{COMMIT}"
    folder = Path(said["vllm"])
    pushed = {name: raw for name, raw in hub.repos["me/drafter"]["main"].items() if name != ".gitattributes"}
    assert pushed == {path.name: path.read_bytes() for path in folder.iterdir()}
    assert {"README.md", "config.json", "export.json", "model.safetensors"} == pushed.keys()
    assert hub.commits == ["eagle3, step 200, for vllm"]
    (created,) = hub.created
    assert created.get("type", "model") == "model"
    assert created.get("private") or created.get("visibility") == "private"


def test_a_repository_that_is_there_is_refused_before_anything_is_written(push: Any, hub: Hub) -> None:
    hub.repos["me/drafter"] = {"main": {"old.txt": b"old"}}

    ended = push("--format", "vllm", "--push-to-hub", "me/drafter")

    assert ended.returncode == 9
    assert f"me/drafter on {hub.url} is there already" in ended.stderr
    assert hub.repos["me/drafter"]["main"] == {"old.txt": b"old"}

    again = push("--format", "vllm", "--push-to-hub", "me/drafter", "--overwrite")
    assert again.returncode == 0, again.stderr
    assert "old.txt" not in hub.repos["me/drafter"]["main"]


@pytest.mark.parametrize("formats", [[], ["--format", "vllm", "--format", "sglang"]])
def test_a_repository_holds_one_format(push: Any, hub: Hub, formats: list[str]) -> None:
    ended = push(*formats, "--push-to-hub", "me/drafter")

    assert ended.returncode != 0
    assert "a repository holds one format; name it with --format: vllm, sglang, speculators" in ended.stderr
    assert not hub.repos


def test_a_target_that_only_this_machine_has_is_not_told_to_others(push: Any, hub: Hub, target: Path) -> None:
    ended = push("--format", "speculators", "--push-to-hub", "me/drafter", "--set", "export.target_name=")
    assert "set export.target_name to the target's name on the hub" in ended.stderr
    assert not hub.repos

    assert push("--format", "speculators", "--push-to-hub", "me/drafter").returncode == 0
    pushed = b"".join(raw for name, raw in hub.repos["me/drafter"]["main"].items() if not name.endswith(".safetensors"))
    assert b"Qwen/Qwen3-8B" in pushed
    assert str(target.parent).encode() not in pushed


def test_options_of_an_upload_need_one(push: Any) -> None:
    assert "name one with --push-to-hub" in push("--private").stderr
