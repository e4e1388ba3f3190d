"""Run in the environment of speculators: load exported drafters as it does, and write the logits that it drafts from.

python judge_formats.py OUT FOLDER...     each FOLDER has inputs.safetensors, too: ids (T,), hidden (T, K*D)

OUT gets logits of each, and its standard output a JSON line of the weights that are not numbers after loading.
EAGLE-3: (steps, T, V), tokens forced. DFlash: (B, V), of the one block whose anchor is `anchor` (1,).
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from speculators import SpeculatorModel, SpeculatorModelConfig

STEPS = 3


def load(folder: Path) -> Any:
    config = SpeculatorModelConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "sdpa"
    return SpeculatorModel.from_pretrained(folder, config=config, dtype=torch.float32).eval()


@torch.no_grad()
def logits(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """What its head puts out while it runs as in training."""
    seen: list[torch.Tensor] = []
    model.lm_head.register_forward_hook(lambda *args: seen.append(args[2][0]))
    ids, hidden = inputs["ids"][None], inputs["hidden"][None]
    documents = torch.zeros_like(ids)
    if "anchor" not in inputs:
        model(hidden_states=hidden, input_ids=ids, document_ids=documents, ttt_steps=STEPS)
        return torch.stack(seen)
    mask = torch.zeros_like(ids)
    mask[0, int(inputs["anchor"])] = 1
    last = torch.zeros(1, ids.shape[1], model.hidden_size)
    model._backbone_forward(hidden, ids, mask, last, documents, max_anchors=1)
    return seen[0]


def main(out: str, *folders: str) -> None:
    broken: dict[str, list[str]] = {}
    results: dict[str, torch.Tensor] = {}
    for folder in folders:
        model = load(Path(folder))
        broken[folder] = [name for name, one in model.state_dict().items() if bool(torch.isnan(one.float()).any())]
        results[folder] = logits(model, load_file(Path(folder) / "inputs.safetensors")).contiguous()
    save_file(results, out)
    print(json.dumps(broken))


if __name__ == "__main__":
    main(*sys.argv[1:])
