"""The ends of a target, without its decoder layers: embedding, final norm, head, and what its folder says of itself.

A drafter's embedding and head begin as the target's, and logits are made of the last state, whoever runs the layers.
A model of no layers is built and loaded, so that `transformers` finds the tensors, whatever their names, the ties
between them and the kind of the norm; safetensors of the layers are not read.
"""

# D hidden size of the target, V vocabulary

from __future__ import annotations

import copy
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import psutil
import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from draftfleet.errors import TargetError

FINAL_NORMS = ("norm", "final_layernorm", "final_norm", "ln_f")

UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError, RuntimeError, SafetensorError)
"""What `transformers` raises of a folder that it cannot load."""


OTHERWISE = (
    "In bfloat16 (trainer.dtype, and evaluation.dtype to evaluate) it takes 2 bytes a parameter. A target that fits "
    "nowhere here is trained for with trainer.target = vllm, and its drafter is measured where the target is served: "
    "`draftfleet export`, then `draftfleet bench --with URL`."
)


class Ends:
    """What lies before and after the decoder layers of a causal language model, frozen."""

    def __init__(self, model: Any, path: str) -> None:
        """Raises TargetError for a model whose logits are not head(norm(last state)), or whose norm is not found."""
        self.path = path
        self.config: Any = model.config.get_text_config()
        self.num_layers: int = self.config.num_hidden_layers
        self.norm: Any = find(model.get_decoder(), FINAL_NORMS, path, "final norm")
        self.embedding: Tensor = model.get_input_embeddings().weight.detach()  # (V, D)
        self.device: torch.device = self.embedding.device
        self.dtype: torch.dtype = self.embedding.dtype
        self.eos_token_ids = _eos_token_ids(model)
        self._head: Any = model.get_output_embeddings()
        self.head: Tensor = self._head.weight.detach()  # (V, D)
        self._softcap: float | None = getattr(self.config, "final_logit_softcapping", None)
        self.norm_scale: Tensor = self._measure_norm_scale()  # (D,)
        self._check_logits(model)

    @torch.no_grad()
    def logits(self, last: Tensor) -> Tensor:
        """(..., D) residual stream before the final norm -> (..., V) float32 logits."""
        logits = self._head(self.norm(last)).float()
        return logits if self._softcap is None else self._softcap * torch.tanh(logits / self._softcap)

    @torch.no_grad()
    def _measure_norm_scale(self) -> Tensor:
        """Measured, since some norms store the scale itself and some what it has above one."""
        if isinstance(self.norm, nn.LayerNorm):
            return self.norm.weight.detach()
        return self.norm(torch.ones(self.embedding.shape[1], device=self.device, dtype=self.dtype)).float()

    @torch.no_grad()
    def _check_logits(self, model: Any) -> None:
        """A model that scales its logits in a way of its own must not pass in silence."""
        ids = torch.arange(4, device=self.device)[None] % len(self.embedding)
        heard = list[Tensor]()

        def hear(_norm: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            heard.append(inputs[0])

        hook = self.norm.register_forward_pre_hook(hear)
        theirs = model(input_ids=ids, use_cache=False).logits.float()
        hook.remove()
        difference = float((self.logits(heard[0]) - theirs).abs().max())
        tolerance = 1e-4 if self.dtype == torch.float32 else 3e-2
        if not difference <= tolerance * float(theirs.abs().max()):
            raise TargetError(
                f"{self.path} ({type(model).__name__}) does not compute its logits as head(norm(last hidden state)): "
                f"they differ by {difference:.3g}. This architecture is not supported as a target."
            )


def load(path: str, dtype: torch.dtype, device: torch.device) -> Ends:
    """Read the ends of the target in folder `path` (or of this name on the hub). Raises TargetError.

    Weights of the layers may be quantised in whatever way: they are not looked at.
    """
    check_path(path)
    try:
        config: Any = AutoConfig.from_pretrained(path)
    except UNREADABLE as error:
        raise unreadable(path, error) from None
    text_config = copy.deepcopy(config).get_text_config()
    _drop_layers(config)
    with _quiet():
        ends = Ends(read(path, config=config, dtype=dtype, device_map={"": device}), path)
    text_config.dtype = dtype
    ends.config, ends.num_layers = text_config, text_config.num_hidden_layers
    return ends


def read(path: str, *, dtype: torch.dtype, device_map: Any, **arguments: Any) -> Any:
    """A frozen causal language model of the folder, every weight of it read. Raises TargetError."""
    try:
        # Straight to its device: eight processes with a copy each would fill the memory of the host.
        model, report = cast(
            tuple[Any, dict[str, Any]],
            AutoModelForCausalLM.from_pretrained(
                path, dtype=dtype, device_map=device_map, output_loading_info=True, **arguments
            ),
        )
    except torch.OutOfMemoryError as error:
        raise TargetError(
            f"target.path = {path} does not fit on {device_map} in {dtype}: {_first_line(error)} {OTHERWISE}"
        ) from None
    except UNREADABLE as error:
        raise unreadable(path, error) from None
    if missing := sorted(report["missing_keys"]):
        raise TargetError(
            f"target.path = {path} lacks {len(missing)} weights of {type(model).__name__}, {missing[0]} for one: they "
            "would be random. Its download is incomplete, or it is no causal language model under these names."
        )
    return model.eval().requires_grad_(False)


def expect_memory(path: str, dtype: torch.dtype) -> None:
    """Raises TargetError where the weights in a folder take more than what is free of this machine's memory.

    A GPU says so itself; here the kernel would kill the process, or others.
    """
    num_bytes = sum(file.stat().st_size for file in Path(path).glob("*.safetensors"))
    try:
        config: Any = AutoConfig.from_pretrained(path)
    except UNREADABLE as error:
        raise unreadable(path, error) from None
    stored = getattr(config, "dtype", None)
    if isinstance(stored, torch.dtype) and not hasattr(config, "quantization_config"):
        num_bytes = num_bytes * dtype.itemsize // stored.itemsize
    free = psutil.virtual_memory().available
    if num_bytes > free:
        raise TargetError(
            f"target.path = {path} takes {num_bytes / 1e9:.3g} GB in {dtype}, and this machine has {free / 1e9:.3g} GB "
            f"of memory free. {OTHERWISE}"
        )


def check_path(path: str) -> None:
    """Raises TargetError if no target is named, or a folder that is not there."""
    if not path:
        raise TargetError("target.path is not set: name the folder, or the hub name, of the target's weights.")
    if not Path(path).is_dir() and (path.startswith((".", "/", "~")) or path.count("/") != 1):
        raise TargetError(f"target.path = {path}: there is no such folder. Name a folder with config.json and weights.")


def find(decoder: Any, names: tuple[str, ...], path: str, what: str) -> Any:
    """The first module of `decoder` that has one of the names. Raises TargetError."""
    for name in names:
        if isinstance(getattr(decoder, name, None), nn.Module):
            return getattr(decoder, name)
    raise TargetError(
        f"{path}: no {what} found in {type(decoder).__name__} (looked for {', '.join(names)}); "
        "this architecture is not supported as a target."
    )


def unreadable(path: str, error: Exception) -> TargetError:
    return TargetError(
        f"target.path = {path} cannot be loaded as a causal language model: {_first_line(error)} "
        "Name a folder with config.json and safetensors, or a model on the hub."
    )


def _first_line(error: Exception) -> str:
    """Errors of transformers run over many lines, and some begin with an empty one."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _drop_layers(config: Any) -> None:
    """Make it the configuration of a model with no decoder layers, and with nothing quantised."""
    text = config.get_text_config()
    num_layers = text.num_hidden_layers
    text.num_hidden_layers = 0
    for name, value in vars(text).items():
        if "layer" in name and isinstance(value, list) and len(cast(list[Any], value)) == num_layers:
            setattr(text, name, [])
    for one in (config, text):
        if hasattr(one, "quantization_config"):
            del one.quantization_config


def _eos_token_ids(model: Any) -> frozenset[int]:
    """Where generation stops: the generation config's ids, else the model config's."""
    generation = getattr(model, "generation_config", None)
    eos = getattr(generation, "eos_token_id", None)
    if eos is None:
        eos = getattr(model.config.get_text_config(), "eos_token_id", None)
    return frozenset([eos] if isinstance(eos, int) else eos or [])


@contextmanager
def _quiet() -> Generator[None]:
    """Without the report of every weight of a layer as one that was not expected."""
    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
