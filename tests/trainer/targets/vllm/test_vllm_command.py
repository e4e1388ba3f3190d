"""The command that starts a server to capture from."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest

from draftfleet.errors import TargetError
from draftfleet.settings import load
from trainer.targets.vllm.command import command, engine_layers

PAGE = Path(__file__).parents[4] / "docs" / "targets.md"


@pytest.fixture
def kimi(tmp_path: Path) -> Path:
    """A folder that says how deep Kimi-K2.5 is."""
    config = {"model_type": "llama", "num_hidden_layers": 61, "hidden_size": 7168}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_the_command_of_the_page_is_the_one_that_is_printed_for_its_settings(kimi: Path) -> None:
    page = PAGE.read_text()
    (text,) = [block for block in re.findall(r"```toml\n(.*?)```", page, re.DOTALL) if "[capture]" in block]
    tables = tomllib.loads(text)
    flags = {f"{section}.{name}": value for section, table in tables.items() for name, value in table.items()}
    path = flags["target.path"]

    printed = command(load(flags=flags | {"target.path": str(kimi)}))

    assert f"```text\n{printed.replace(str(kimi), path)}\n```" in page


def test_layers_are_those_of_the_algorithm_or_those_that_are_set(kimi: Path) -> None:
    def layers(**flags: object) -> list[int]:
        text = command(load(flags={"target.path": str(kimi)} | {n.replace("__", "."): v for n, v in flags.items()}))
        return json.loads(re.findall(r"layer_ids\": (\[.*?\])", text)[0])

    assert layers() == [2, 30, 58, 61]
    assert layers(trainer__layers=[5, 60]) == [6, 61]
    assert len(layers(trainer__algorithm="dflash")) == 6


def test_the_last_layer_is_the_last_state() -> None:
    assert engine_layers([1, 3], 8) == [2, 4, 8]
    assert engine_layers([1, 7], 8) == [2, 8]


def test_without_a_target_there_is_no_command(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match=r"target.path is not set"):
        command(load())
    with pytest.raises(TargetError, match=r"no config.json that says how deep it is"):
        command(load(flags={"target.path": str(tmp_path)}))
