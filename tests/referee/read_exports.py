"""Run in the environment of speculators and SpecForge: load an export with their own readers, and print what they see.

python read_exports.py FOLDER TARGET     FOLDER holds speculators/, rows/ and conversations/
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from specforge.data.prompt_builder import prepare_prompt_tasks
from speculators.data_generation.preprocessing import load_and_preprocess_dataset
from speculators.train.data import ArrowDataset, CollateFn
from transformers import AutoTokenizer

HIDDEN, LAYERS, LONGEST = 4, 4, 1024


def plain(item: dict[str, Any]) -> dict[str, list[int]]:
    return {name: [int(value) for value in item[name]] for name in ("input_ids", "loss_mask")}


def speculators(folder: Path) -> dict[str, Any]:
    """As its trainer reads: the folder, with the hidden states of each line beside it."""
    ids = [item["input_ids"] for item in ArrowDataset(LONGEST, folder).data]
    (folder / "hidden_states").mkdir()
    for number, row in enumerate(ids):
        states = torch.zeros(len(row), LAYERS, HIDDEN)
        save_file({"token_ids": row, "hidden_states": states}, folder / f"hidden_states/hs_{number}.safetensors")
    data = ArrowDataset(LONGEST, folder, on_missing="raise")
    items = [data[number] for number in range(len(data))]
    batch = CollateFn(LONGEST, HIDDEN)(items)
    return {
        "rows": [plain(item) for item in items],
        "approx_lengths": data.approx_lengths,
        "batch_mask": int(batch["loss_mask"].sum()),
    }


def prepared(file: Path, target: str) -> list[dict[str, list[int]]]:
    """As `speculators prepare-data` takes rows that are tokenized already."""
    data, _ = load_and_preprocess_dataset(target, [str(file)], seq_length=LONGEST, build_dataset_num_proc=1)
    return [plain(item) for item in data]


def specforge(file: Path, tokenizer: Any, cache: Path, template: str) -> list[dict[str, list[int]]]:
    tasks = prepare_prompt_tasks(
        file,
        tokenizer,
        chat_template=template,
        max_length=LONGEST,
        is_preformatted=False,
        train_only_last_turn=True,
        cache_dir=str(cache),
        cache_key="conversations",
        num_proc=1,
    )
    return [plain(task["payload"]) for task in tasks]


def main(folder: Path, target: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(target)
    rows, conversations = folder / "rows/train.jsonl", folder / "conversations/train.jsonl"
    said = {
        "speculators": speculators(folder / "speculators/train"),
        "prepared": prepared(rows, target),
        "specforge rows": specforge(rows, None, folder / "cache", "qwen3-thinking"),
        "specforge conversations": specforge(conversations, tokenizer, folder / "cache", "qwen3-thinking"),
    }
    (folder / "said.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
