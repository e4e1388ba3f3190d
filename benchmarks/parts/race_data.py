"""The rows of the race: the tiny target's greedy answers to made-up prompts, and what it thought of them."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from transformers import AutoTokenizer

from draftfleet.settings import load
from trainer import targets
from trainer.speculate import Limits, decode_batch
from trainer.targets import Row
from trainer.targets.hf import HfTarget

ROOT = Path(__file__).parents[2]
TARGET = ROOT / "examples" / "tiny-target"
MAX_TOKENS = 256
TUNING, JUDGED = 128, 192
"""Held-out prompts to choose recipes by, and those that the chosen ones are judged by, once."""

BATCH = 64


def make(folder: Path, *, tokens: int, longest: int, layers: list[int]) -> None:
    """Rows of at least that many tokens together. Ones that are there stay as they are."""
    if (folder / "rows.json").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    settings = load(flags={"target.path": str(TARGET), "trainer.layers": layers, "trainer.dtype": "float32"})
    target = targets.load(settings, layers, torch.device("cpu"))
    assert isinstance(target, HfTarget)
    heldout, train = prompts()
    (folder / "tuning.json").write_text(json.dumps(heldout[:TUNING]))
    (folder / "judged.json").write_text(json.dumps(heldout[TUNING:]))

    rows = list(_answered(target, train, tokens, longest))
    with (folder / "states.f32").open("wb") as file:
        for row in rows:
            ids = torch.tensor(row["ids"])
            captured = next(target.capture([[Row("", ids, torch.ones(len(ids), dtype=torch.bool))]]))[0]
            torch.cat((captured.hidden, captured.last), dim=-1).numpy().astype(np.float32).tofile(file)
    width = (len(layers) + 1) * target.config.hidden_size
    held = {"width": width, "hidden_size": target.config.hidden_size, "rows": rows}
    (folder / "rows.json").write_text(json.dumps(held))
    print(f"{len(rows)} rows, {sum(len(row['ids']) for row in rows):,} tokens in {folder}", file=sys.stderr)


def prompts() -> tuple[list[list[int]], list[list[int]]]:
    """Held out, and to train on, of which none asks what a held-out one asks."""
    sys.path.insert(0, str(TARGET))
    from make_prompts import make as made  # noqa: PLC0415  # a script beside the model

    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    found: dict[str, list[list[int]]] = {"heldout": [], "train": []}
    for prompt in made(8_000, TUNING + JUDGED):
        ids = tokenizer.apply_chat_template(prompt["messages"], add_generation_prompt=True, return_dict=True)
        found[str(prompt["split"])].append(ids["input_ids"])
    return found["heldout"], found["train"]


def _answered(
    target: HfTarget, asked: list[list[int]], tokens: int, longest: int
) -> Iterator[dict[str, list[int] | int]]:
    limits = Limits(MAX_TOKENS, context_tokens=1024)
    total = 0
    for start in range(0, len(asked), BATCH):
        part = sorted(asked[start : start + BATCH], key=len)
        for prompt, answer in zip(part, decode_batch(target, part, limits), strict=True):
            if len(prompt) + len(answer) <= longest:
                yield {"ids": prompt + answer, "prompt": len(prompt)}
                total += len(prompt) + len(answer)
        print(f"{total:,} of {tokens:,} tokens", file=sys.stderr)
        if total >= tokens:
            return
