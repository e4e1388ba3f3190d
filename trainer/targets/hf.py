"""The target in this process: a causal language model of `transformers`, frozen, listened to by hooks.

The last hidden state is taken where it enters the final norm. The last entry of Hugging Face's own `hidden_states` has
passed that norm already, so it is never used.
"""

# B rows, T tokens, D hidden size of the target, K chosen layers, V vocabulary

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache

from draftfleet.errors import SettingsError, TargetError
from draftfleet.settings import Settings
from trainer.devices import choose_dtype
from trainer.targets import Captured, Row, check_ids, checked_layers, weights
from trainer.targets.weights import Ends

DECODER_LAYERS = ("layers", "h", "blocks")

ATTENTION_KINDS = {"full_attention", "sliding_attention", "chunked_attention"}
"""Layers whose cache is one entry a token."""

Cache = DynamicCache


class Ear(threading.local):
    """What was heard, thread by thread: one may capture while another computes logits."""

    def __init__(self) -> None:
        self.heard: dict[int | str, Tensor] = {}


class HfTarget:
    """A frozen target. `layers` are A ids; see trainer.targets."""

    def __init__(self, model: Any, layers: list[int] | None, path: str, ends: Ends | None = None) -> None:
        """`ends` are given where the model's own lie on other devices, or on none."""
        self.path = path
        self._ends = ends = ends or Ends(model, path)
        self.config: Any = ends.config
        self._decoder: Any = model.get_decoder()
        decoder_layers = weights.find(self._decoder, DECODER_LAYERS, path, "decoder layers")
        self.layers = checked_layers(layers, len(decoder_layers))
        self.embedding, self.head, self.norm_scale = ends.embedding, ends.head, ends.norm_scale
        self.device, self.dtype = ends.device, ends.dtype
        self.eos_token_ids = ends.eos_token_ids
        # transformers renamed the argument during version 5; delete once 5.40, which drops the old name, is required.
        parameters = inspect.signature(self._decoder.forward).parameters
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"

        self._ear = Ear()
        for layer in self.layers:
            decoder_layers[layer].register_forward_hook(self._hear_layer(layer))
        norm = weights.find(self._decoder, weights.FINAL_NORMS, path, "final norm")
        norm.register_forward_pre_hook(self._hear_last)

    def capture(self, batches: Iterable[list[Row]]) -> Iterator[list[Captured]]:
        """Rows of a batch run together, padded on the right. Raises TargetError for ids outside the vocabulary.

        No attention mask is needed: a causal model cannot look at padding that lies to the right, and without a mask
        attention takes its fast causal path.
        """
        for batch in batches:
            if not batch:
                yield []
                continue
            check_ids(batch, len(self.embedding), self.path)
            ids = pad_sequence([row.ids for row in batch], batch_first=True).to(self.device)
            hidden, last = self.forward(ids)
            yield [
                Captured(row, hidden[index, : len(row.ids)], last[index, : len(row.ids)])
                for index, row in enumerate(batch)
            ]

    @torch.no_grad()
    def forward(self, ids: Tensor, cache: Cache | None = None, **inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Run ids (B, T) after what `cache` holds. Returns hidden states (B, T, K*D) and the last state (B, T, D)."""
        self._decoder(input_ids=ids, use_cache=cache is not None, **{self._cache_argument: cache}, **inputs)
        hidden = torch.cat([self._heard[layer].to(self.device) for layer in self.layers], dim=-1)
        last = self._heard["last"].to(self.device)
        self._heard.clear()
        return hidden, last

    @torch.no_grad()
    def logits(self, last: Tensor) -> Tensor:
        """(..., D) residual stream before the final norm -> (..., V) float32 logits."""
        logits = self._ends.logits(last)
        self._heard.clear()
        return logits

    def new_cache(self) -> Cache:
        """A cache that can be cropped to any length, sliding windows included.

        Raises TargetError for a target with recurrent layers: transformers (5.24) crops what they convolve, but not
        their states, and a draft that was refused would stay in them.
        """
        if recurrent := set(getattr(self.config, "layer_types", None) or ()) - ATTENTION_KINDS:
            raise TargetError(
                f"{self.path} has {', '.join(sorted(recurrent))} layers, whose state cannot be taken back when a draft "
                "is refused: it can be trained for and exported, but not evaluated here. Serve the exported drafter "
                "and read the engine's counters (docs/exporting.md, Serving)."
            )
        return DynamicCache()

    @property
    def _heard(self) -> dict[int | str, Tensor]:
        return self._ear.heard

    def _hear_layer(self, layer: int) -> Any:
        def hear(_module: nn.Module, _inputs: Any, output: Any) -> None:
            self._heard[layer] = output[0] if isinstance(output, tuple) else output

        return hear

    def _hear_last(self, _module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self._heard["last"] = inputs[0]


def load(settings: Settings, layers: list[int] | None, device: torch.device) -> HfTarget:
    """Load `target.path`, frozen, in `trainer.dtype`. Raises TargetError or SettingsError.

    With `trainer.device_map` its layers are spread over the GPUs of this node; states, embedding and head are on
    `device`.
    """
    path, knobs = settings.target.path, settings.trainer
    weights.check_path(path)
    dtype = choose_dtype(knobs.dtype, device)
    if knobs.device_map is None:
        if device.type == "cpu":
            weights.expect_memory(path, dtype)
        return HfTarget(weights.read(path, dtype=dtype, device_map={"": device}), layers, path)
    if knobs.processes > 1:
        raise SettingsError(
            f"trainer.device_map = {knobs.device_map} spreads one target over all GPUs, and trainer.processes = "
            f"{knobs.processes} would each load one: set trainer.processes = 1, or leave trainer.device_map out."
        )
    ends = weights.load(path, dtype, device)
    model = weights.read(path, dtype=dtype, device_map=knobs.device_map, **_memory(knobs.target_gpu_gb))
    return HfTarget(model, layers, path, ends)


def _memory(gpu_gb: float | None) -> dict[str, Any]:
    """What a device may hold of the target, as `accelerate` takes it: nothing is put on a CPU then."""
    if gpu_gb is None or not torch.cuda.is_available():
        return {}
    return {"max_memory": {number: int(gpu_gb * 1e9) for number in range(torch.cuda.device_count())}}
