"""The target in this process: a causal language model of `transformers`, frozen, listened to by hooks.

The last hidden state is taken where it enters the final norm. The last entry of Hugging Face's own `hidden_states` has
passed that norm already, so it is never used.
"""

# B rows, T tokens, D hidden size of the target, K chosen layers, V vocabulary

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, DynamicCache

from draftfleet.errors import TargetError
from draftfleet.settings import Settings
from trainer.devices import choose_dtype
from trainer.targets import Captured, Row, default_layers

DECODER_LAYERS = ("layers", "h", "blocks")
FINAL_NORMS = ("norm", "final_layernorm", "final_norm", "ln_f")

ATTENTION_KINDS = {"full_attention", "sliding_attention", "chunked_attention"}
"""Layers whose cache is one entry a token."""

Cache = DynamicCache


class Ear(threading.local):
    """What was heard, thread by thread: one may capture while another computes logits."""

    def __init__(self) -> None:
        self.heard: dict[int | str, Tensor] = {}


class HfTarget:
    """A frozen target. `layers` are A ids; see trainer.targets."""

    def __init__(self, model: Any, layers: list[int] | None, path: str) -> None:
        self.path = path
        self.config: Any = model.config.get_text_config()
        self._decoder: Any = model.get_decoder()
        self._norm = _find(self._decoder, FINAL_NORMS, path, "final norm")
        decoder_layers = _find(self._decoder, DECODER_LAYERS, path, "decoder layers")
        self.layers = _checked(layers, len(decoder_layers))
        self.embedding: Tensor = model.get_input_embeddings().weight.detach()
        self.device: torch.device = self.embedding.device
        self.dtype: torch.dtype = self.embedding.dtype
        self.eos_token_ids = _eos_token_ids(model)
        self._head: Any = model.get_output_embeddings()
        self.head: Tensor = self._head.weight.detach()
        self._softcap: float | None = getattr(self.config, "final_logit_softcapping", None)
        # transformers renamed the argument during version 5; delete once 5.40, which drops the old name, is required.
        parameters = inspect.signature(self._decoder.forward).parameters
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"

        self._ear = Ear()
        for layer in self.layers:
            decoder_layers[layer].register_forward_hook(self._hear_layer(layer))
        self._norm.register_forward_pre_hook(self._hear_last)
        self.norm_scale: Tensor = self._measure_norm_scale()
        self._check_logits(model)

    def capture(self, batches: Iterable[list[Row]]) -> Iterator[list[Captured]]:
        """Rows of a batch run together, padded on the right. Raises TargetError for ids outside the vocabulary.

        No attention mask is needed: a causal model cannot look at padding that lies to the right, and without a mask
        attention takes its fast causal path.
        """
        for batch in batches:
            self._check_ids(batch)
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
        hidden = torch.cat([self._heard[layer] for layer in self.layers], dim=-1)
        last = self._heard["last"]
        self._heard.clear()
        return hidden, last

    @torch.no_grad()
    def logits(self, last: Tensor) -> Tensor:
        """(..., D) residual stream before the final norm -> (..., V) float32 logits."""
        logits = self._head(self._norm(last)).float()
        self._heard.clear()
        return logits if self._softcap is None else self._softcap * torch.tanh(logits / self._softcap)

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

    def _check_ids(self, batch: list[Row]) -> None:
        vocab_size = len(self.embedding)
        for row in batch:
            if len(row.ids) and not 0 <= int(row.ids.min()) <= int(row.ids.max()) < vocab_size:
                raise TargetError(
                    f"sample {row.key} has token ids from {int(row.ids.min())} to {int(row.ids.max())}, the target "
                    f"{self.path} has a vocabulary of {vocab_size}: the samples were made by another model, or with "
                    "another tokenizer. Point target.path at the model that the servers serve."
                )

    @torch.no_grad()
    def _measure_norm_scale(self) -> Tensor:
        """Measured, since some norms store the scale itself and some what it has above one."""
        if isinstance(self._norm, nn.LayerNorm):
            return self._norm.weight.detach()
        scale = self._norm(torch.ones(self.embedding.shape[1], device=self.device, dtype=self.dtype)).float()
        self._heard.clear()
        return scale

    @torch.no_grad()
    def _check_logits(self, model: Any) -> None:
        """A model that scales its logits in a way of its own must not pass in silence."""
        ids = torch.arange(4, device=self.device)[None] % len(self.embedding)
        theirs = model(input_ids=ids, use_cache=False).logits.float()
        ours = self.logits(self.forward(ids)[1])
        difference = float((ours - theirs).abs().max())
        tolerance = 1e-4 if self.dtype == torch.float32 else 3e-2
        if not difference <= tolerance * float(theirs.abs().max()):
            raise TargetError(
                f"{self.path} ({type(model).__name__}) does not compute its logits as head(norm(last hidden state)): "
                f"they differ by {difference:.3g}. This architecture is not supported by trainer.target = hf."
            )


def load(settings: Settings, layers: list[int] | None, device: torch.device) -> HfTarget:
    """Load `target.path`, frozen, in `trainer.dtype`. Raises TargetError."""
    path = settings.target.path
    if not path:
        raise TargetError("target.path is not set: name the folder, or the hub name, of the target's weights.")
    if not Path(path).is_dir() and (path.startswith((".", "/", "~")) or path.count("/") != 1):
        raise TargetError(f"target.path = {path}: there is no such folder. Name a folder with config.json and weights.")
    dtype = choose_dtype(settings.trainer.dtype, device)
    try:
        # Straight to its device: eight processes with a copy each would fill the memory of the host.
        model, report = cast(
            tuple[Any, dict[str, Any]],
            AutoModelForCausalLM.from_pretrained(path, dtype=dtype, device_map={"": device}, output_loading_info=True),
        )
    except torch.OutOfMemoryError as error:
        raise TargetError(
            f"target.path = {path} does not fit on {device} in {dtype}: {_first_line(error)} In bfloat16 "
            "(trainer.dtype, and evaluation.dtype to evaluate) it takes 2 bytes a parameter."
        ) from None
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError) as error:
        raise TargetError(
            f"target.path = {path} cannot be loaded as a causal language model: {_first_line(error)} "
            "Name a folder with config.json and safetensors, or a model on the hub."
        ) from None
    if missing := sorted(report["missing_keys"]):
        raise TargetError(
            f"target.path = {path} lacks {len(missing)} weights of {type(model).__name__}, {missing[0]} for one: they "
            "would be random. Its download is incomplete, or it is no causal language model under these names."
        )
    return HfTarget(model.eval().requires_grad_(False), layers, path)


def _first_line(error: Exception) -> str:
    """Errors of transformers run over many lines, and some begin with an empty one."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _find(decoder: Any, names: tuple[str, ...], path: str, what: str) -> Any:
    for name in names:
        if isinstance(getattr(decoder, name, None), nn.Module):
            return getattr(decoder, name)
    raise TargetError(
        f"{path}: no {what} found in {type(decoder).__name__} (looked for {', '.join(names)}); "
        "this architecture is not supported by trainer.target = hf."
    )


def _checked(layers: list[int] | None, num_layers: int) -> list[int]:
    if layers is None:
        layers = default_layers(num_layers)
    increasing = all(a < b for a, b in pairwise(layers))
    if not layers or not increasing or layers[0] < 0 or layers[-1] >= num_layers:
        raise TargetError(
            f"trainer.layers = {layers}: the target has layers 0 to {num_layers - 1}; name them once each, in "
            "increasing order (layer i means its output, `hidden_states[i + 1]` of Hugging Face)."
        )
    return layers


def _eos_token_ids(model: Any) -> frozenset[int]:
    """Where generation stops: the generation config's ids, else the model config's."""
    generation = getattr(model, "generation_config", None)
    eos = getattr(generation, "eos_token_id", None)
    if eos is None:
        eos = getattr(model.config.get_text_config(), "eos_token_id", None)
    return frozenset([eos] if isinstance(eos, int) else eos or [])
