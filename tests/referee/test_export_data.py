"""Exports for SpecForge 0.2.0 and speculators 0.9.0, loaded by their own readers: ids and masks arrive as they are.

Both live in an environment of their own, which `make referee` makes. Without it the tests are skipped: vLLM, not they,
is the referee of what a server says.
"""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from draftfleet import tokens
from draftfleet.export_data.export import export
from draftfleet.export_data.units import Wanted
from draftfleet.names import batch_id
from draftfleet.records import Prompt, Sample
from draftfleet.runs import Run
from draftfleet.settings import load

pytestmark = [pytest.mark.referee, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {}}}}}]
ANSWERS = [("Let me add.\nIt is 7.", "7"), ("Short.", "It is 12, of course."), ("", "No thought at all.")]


@pytest.fixture
def python() -> Path:
    path = Path(os.environ.get("SPECULATORS_PYTHON", ROOT / ".venv-speculators/bin/python"))
    if not path.exists():
        pytest.skip(f"{path} is not there: `make referee` makes it, or SPECULATORS_PYTHON names another")
    return path.absolute()


@pytest.fixture
def samples(
    run: Run, target: Path, make_prompts: Callable[..., list[Prompt]], make_sample: Callable[..., Sample]
) -> list[Sample]:
    """Answers of the tiny target, with the ids that its template gives them; one of them has tools."""
    tokenizer = tokens.load(target)
    batch = batch_id("train", 0)
    found: list[Sample] = []
    for number, (prompt, (reasoning, content)) in enumerate(zip(make_prompts(3), ANSWERS, strict=True)):
        answer = tokenizer.encode((f"<think>\n{reasoning}\n</think>\n\n" if reasoning else "") + f"{content}<|im_end|>")
        ids = {"prompt_token_ids": tokenizer.prompt_ids(prompt.messages), "token_ids": answer}
        said = {"reasoning": reasoning or None, "content": content, "completion_tokens": len(answer)}
        found.append(make_sample(prompt, batch, **ids, **said, tools=TOOLS if number == 1 else None))
    run.commit(batch, found)
    return found


@pytest.fixture
def said(run: Run, samples: list[Sample], target: Path, python: Path, tmp_path: Path) -> dict[str, Any]:
    """What their readers see of the three exports."""
    settings = load(flags={"storage.url": run.storage.url, "run": run.name})
    export(settings, tmp_path / "speculators", Wanted(format="speculators"))
    export(settings, tmp_path / "rows", Wanted(format="specforge"))
    export(settings, tmp_path / "conversations", Wanted(format="specforge", turns="conversations"))
    command = [str(python), str(Path(__file__).with_name("read_exports.py")), str(tmp_path), str(target)]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf"), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert ended.returncode == 0, ended.stderr[-4000:]
    return json.loads((tmp_path / "said.json").read_text())


def test_their_readers_see_the_exact_ids_and_our_mask(
    said: dict[str, Any], samples: list[Sample], target: Path, figure: Callable[[str, object], None]
) -> None:
    exact = [
        {
            "input_ids": sample.prompt_token_ids + sample.token_ids,
            "loss_mask": [0] * len(sample.prompt_token_ids) + [1] * len(sample.token_ids),
        }
        for sample in samples
    ]

    assert said["speculators"]["rows"] == exact
    assert said["speculators"]["approx_lengths"] == [len(row["input_ids"]) for row in exact]
    assert said["speculators"]["batch_mask"] == sum(len(sample.token_ids) for sample in samples)
    assert sorted(said["prepared"], key=str) == sorted(exact, key=str)  # prepare-data shuffles
    assert said["specforge rows"] == exact
    figure("rows that speculators and SpecForge read as they were written", len(exact))

    tokenizer = tokens.load(target)
    rendered = sorted(
        tokenizer.decode([one for one, is_trained in zip(*row.values(), strict=True) if is_trained]).strip()
        for row in said["specforge conversations"]
    )
    assert rendered == sorted(
        f"<think>\n{reasoning}\n</think>\n\n{content}<|im_end|>" for reasoning, content in ANSWERS
    )
