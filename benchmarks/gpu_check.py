"""Whether drafters train on this GPU as they do in the eager form: kernels, precision, memory, a short training.

    make gpu-check                                    on one card, under 10 minutes
    python benchmarks/gpu_check.py --device cpu       the same recipe, reduced

The target is random and made here; nothing is downloaded. Ends with 0 if all is well, 1 if a check failed, and 2 on a
machine without a GPU. How to read its table: docs/gpu.md.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_
from transformers import Qwen3Config, Qwen3ForCausalLM

from draftfleet.settings import load
from trainer import algorithms, optimizers
from trainer.algorithms.execution import Execution, compile_layers, settle
from trainer.prefetch import Prefetch
from trainer.targets import Captured, Row
from trainer.targets.hf import HfTarget

ALGORITHMS = ("eagle3", "dflash")

EXACT = 1e-4
"""Of float32, relative to the largest entry: sums in another order, through several layers."""
ROUGH = 3e-2
"""Of bfloat16, which keeps 8 bits: 0.4 % for each rounding."""
LIKE = 0.99
"""Cosine of a gradient in bfloat16 to that in float32."""


@dataclass(frozen=True, slots=True)
class Size:
    hidden: int
    heads: int
    head_dim: int
    vocab: int
    lengths: tuple[int, ...]  # tokens of the rows of a batch
    anchors: int
    steps: int  # of the short training


GPU = Size(1024, 16, 128, 32_000, (2048, 1500, 977, 512), 256, 60)
REDUCED = Size(64, 4, 32, 211, (140, 61), 8, 8)


class Failed(Exception):
    """A check that does not hold, with the numbers."""


@dataclass(frozen=True, slots=True)
class Bench:
    size: Size
    device: torch.device
    target: HfTarget

    @classmethod
    def make(cls, size: Size, device: torch.device) -> Bench:
        torch.manual_seed(0)
        config = Qwen3Config(
            vocab_size=size.vocab, hidden_size=size.hidden, intermediate_size=3 * size.hidden, num_hidden_layers=8,
            num_attention_heads=size.heads, num_key_value_heads=size.heads // 2, head_dim=size.head_dim,
            max_position_embeddings=4096, initializer_range=0.1, tie_word_embeddings=False,
        )  # fmt: skip
        model = Qwen3ForCausalLM(config).to(device).eval().requires_grad_(False)
        return cls(size, device, HfTarget(model, [1, 3, 5], "a random Qwen3"))

    def algorithm(self, name: str) -> Any:
        """A drafter, the same one each time."""
        flags = {
            "trainer.algorithm": name, "dflash.num_layers": 3, "dflash.block_size": 8,
            "dflash.anchors": self.size.anchors,
            "dflash.mask_token_id": self.size.vocab - 1, "dflash.sliding_window": 100,
            "dflash.layer_types": ["sliding_attention", "full_attention", "full_attention"],
        }  # fmt: skip
        settings = load(flags=flags)
        torch.manual_seed(1)
        return algorithms.build(algorithms.configure(settings, self.target), self.target)

    def batch(self, number: int = 0) -> list[Captured]:
        """Answers that a drafter can learn: each repeats a few tokens. Another number, other tokens and lengths."""
        dice = torch.Generator().manual_seed(number)
        rows: list[Row] = []
        for place, most in enumerate(self.size.lengths):
            length = most - 7 * (number % 5)
            phrase = torch.randint(0, min(self.size.vocab - 1, 400), (11,), generator=dice)
            ids = phrase.repeat(length // 11 + 1)[:length]
            rows.append(Row(f"row-{number}-{place}", ids, torch.arange(length) >= length // 5))
        return next(iter(self.target.capture([rows])))

    def found(
        self, algorithm: Any, captured: list[Captured], *, rough: bool = False
    ) -> tuple[float, dict[str, Tensor]]:
        """The loss for each unit of its weight, and the gradients."""
        algorithm.drafter.zero_grad()
        with torch.autocast(self.device.type, torch.bfloat16, enabled=rough):
            loss = algorithm.loss(algorithm.collate(captured))
        loss.total.backward()
        weights = algorithm.drafter.named_parameters()
        gradients = {name: weight.grad.clone() for name, weight in weights if weight.grad is not None}
        return float(loss.total.detach()) / loss.weight, gradients


def expect(is_so: bool, said: str) -> None:
    if not is_so:
        raise Failed(said)


def furthest(ours: dict[str, Tensor], oracle: dict[str, Tensor]) -> float:
    """The largest difference between two sets of gradients, relative to the largest entry of each."""
    assert ours.keys() == oracle.keys()
    return max(float((ours[name] - other).abs().max() / other.abs().max()) for name, other in oracle.items())


def least_alike(ours: dict[str, Tensor], oracle: dict[str, Tensor]) -> float:
    return min(
        float(F.cosine_similarity(ours[name].flatten(), other.flatten(), dim=0)) for name, other in oracle.items()
    )


def what_auto_chooses(bench: Bench, name: str) -> str:
    algorithm = bench.algorithm(name)
    settle(load(flags={"trainer.dtype": "float32"}).trainer, algorithm, bench.target)
    chosen = "flex" if algorithm.execution.flex else "eager"
    is_compiled = any(part in vars(module) for module in algorithm.drafter.modules() for part in ("outputs", "after"))
    if bench.device.type == "cuda" and torch.cuda.get_device_capability(bench.device) >= (8, 0):
        expect(chosen == "flex" and is_compiled, f"{chosen}, compiled: {is_compiled}; the log above says why")
    return f"{chosen}, {'compiled' if is_compiled else 'not compiled'}"


def flex_in_float32(bench: Bench, name: str) -> str:
    algorithm, captured = bench.algorithm(name), bench.batch()
    loss, oracle = bench.found(algorithm, captured)
    algorithm.execution = Execution(flex=True)
    ours, gradients = bench.found(algorithm, captured)
    off = furthest(gradients, oracle)
    expect(
        abs(ours - loss) <= EXACT * loss and off <= EXACT, f"loss {ours:.6f}, not {loss:.6f}; gradients off {off:.1e}"
    )
    return f"loss {ours:.5f}, gradients off {off:.1e}"


def flex_in_bfloat16(bench: Bench, name: str) -> str:
    algorithm, captured = bench.algorithm(name), bench.batch()
    loss, oracle = bench.found(algorithm, captured)
    algorithm.execution = Execution(flex=True)
    ours, gradients = bench.found(algorithm, captured, rough=True)
    alike = least_alike(gradients, oracle)
    expect(abs(ours - loss) <= ROUGH * loss and alike >= LIKE, f"loss {ours:.5f}, not {loss:.5f}; cosine {alike:.4f}")
    dtypes = {weight.dtype for weight in algorithm.drafter.parameters()}
    expect(dtypes == {torch.float32}, f"weights are {dtypes}")
    return f"loss {ours:.5f} ({loss:.5f}), cosine {alike:.4f}"


def layers_compiled(bench: Bench, name: str) -> str:
    algorithm = bench.algorithm(name)
    expected = [bench.found(algorithm, bench.batch(number)) for number in range(4)]
    algorithm.execution = Execution(flex=bench.device.type == "cuda")
    compile_layers(algorithm.drafter, **({} if bench.device.type == "cuda" else {"backend": "eager"}))
    off, graphs = 0.0, list[int]()
    for number, (loss, oracle) in enumerate(expected):
        ours, gradients = bench.found(algorithm, bench.batch(number))
        expect(abs(ours - loss) <= EXACT * loss, f"loss {ours:.6f}, not {loss:.6f}")
        off = max(off, furthest(gradients, oracle))
        graphs.append(counters["stats"]["unique_graphs"])
    expect(off <= EXACT, f"gradients off {off:.1e}")
    expect(graphs[-1] == graphs[1], f"graphs after each batch: {graphs}: other lengths were compiled anew")
    return f"gradients off {off:.1e}, no other length compiled anew"


def checkpointing(bench: Bench, name: str) -> str:
    algorithm, captured = bench.algorithm(name), bench.batch()
    is_flex = bench.device.type == "cuda"
    kept: list[int] = []
    found: list[tuple[float, dict[str, Tensor]]] = []
    for recomputes in (False, True):
        algorithm.execution = Execution(flex=is_flex, recomputes=recomputes)
        found.append(bench.found(algorithm, captured))
        kept.append(_kept_bytes(algorithm, captured))
    off = furthest(found[1][1], found[0][1])
    expect(
        found[0][0] == found[1][0] and off <= EXACT, f"loss {found[1][0]}, not {found[0][0]}; gradients off {off:.1e}"
    )
    expect(kept[1] < kept[0], f"keeps {_mib(kept[1])}, and without it {_mib(kept[0])}")
    return f"keeps {_mib(kept[1])} in place of {_mib(kept[0])}"


def short_training(bench: Bench, name: str) -> str:
    """By flex attention in bfloat16 with float32 weights, beside the eager form in float32."""
    ends: list[float] = []
    for is_tested in (False, True):
        algorithm = bench.algorithm(name)
        algorithm.execution = Execution(flex=is_tested, recomputes=is_tested)
        knobs = load(flags={"trainer.lr": 1e-3}).trainer
        optimizer = optimizers.make(knobs, algorithm.drafter)
        losses: list[float] = []
        for step in range(bench.size.steps):
            loss, gradients = bench.found(algorithm, bench.batch(step % 3), rough=is_tested)
            norm = clip_grad_norm_(algorithm.drafter.parameters(), 1.0)
            expect(bool(torch.isfinite(norm)), f"the gradient of step {step} is {float(norm)}: {sorted(gradients)}")
            optimizer.step()
            losses.append(loss)
        quarter = max(1, len(losses) // 4)
        first, last = sum(losses[:quarter]) / quarter, sum(losses[-quarter:]) / quarter
        expect(last < first, f"the loss went from {first:.4f} to {last:.4f}")
        ends.append(last)
    expect(abs(ends[1] - ends[0]) <= 0.05 * ends[0] + 0.02, f"ends at {ends[1]:.4f}, the eager form at {ends[0]:.4f}")
    return f"{bench.size.steps} steps, loss {ends[1]:.4f} ({ends[0]:.4f})"


class Awake:
    """As much of a feed as a prefetch looks at: rows are always there."""

    waited_s = 0.0
    is_waiting = False

    def close(self) -> None: ...

    def part(self) -> None: ...


def states_ahead(bench: Bench, name: str) -> str:
    """Captured in a thread while drafters train: a stream that is not waited for, or memory that is used again too
    early, shows as other states."""
    batches = [[one.row for one in bench.batch(number)] for number in range(8)]
    expected = [[(one.hidden.cpu(), one.last.cpu()) for one in batch] for batch in bench.target.capture(batches)]
    algorithm, feed, off = bench.algorithm(name), cast(Any, Awake()), 0.0
    optimizer = optimizers.make(load(flags={"trainer.lr": 1e-3}).trainer, algorithm.drafter)
    with Prefetch(bench.target.capture(batches), feed, depth=3, device=bench.device) as ahead:
        for captured, oracle in zip(ahead, expected, strict=True):
            bench.found(algorithm, captured)
            optimizer.step()
            for one, (hidden, last) in zip(captured, oracle, strict=True):
                for ours, other in ((one.hidden.cpu(), hidden), (one.last.cpu(), last)):
                    off = max(off, float((ours - other).abs().max() / other.abs().max()))
    expect(off <= EXACT, f"states off {off:.1e}")
    return f"{len(batches)} batches, states off {off:.1e}"


CHECKS: dict[str, Callable[[Bench, str], str]] = {
    "auto": what_auto_chooses,
    "flex attention, float32": flex_in_float32,
    "flex attention, bfloat16": flex_in_bfloat16,
    "compiled layers": layers_compiled,
    "activation checkpointing": checkpointing,
    "hidden states ahead": states_ahead,
    "short training": short_training,
}


def _kept_bytes(algorithm: Any, captured: list[Captured]) -> int:
    """What a forward pass keeps for the backward pass. A storage counts once."""
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        algorithm.loss(algorithm.collate(captured))
    return sum(kept.values())


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"


def run(bench: Bench) -> int:
    """Run and print every check. Returns how many failed."""
    is_gpu, failed = bench.device.type == "cuda", 0
    print(f"{'check':26} {'algorithm':9} {'result':6} {'seconds':>7} {'peak':>13}  found", flush=True)
    for check, do in CHECKS.items():
        for name in ALGORITHMS:
            torch.compiler.reset()
            if is_gpu:
                torch.cuda.reset_peak_memory_stats()
            begun = time.perf_counter()
            try:
                result, said = "ok", do(bench, name)
            except Exception as error:  # a kernel fails in ways of its own; the others are still of interest
                failed += 1
                kind = "" if isinstance(error, Failed) else f"{type(error).__name__}: "
                result, said = "FAILED", kind + " ".join(str(error).split())[:300]
            peak = _mib(torch.cuda.max_memory_allocated()) if is_gpu else "-"
            print(f"{check:26} {name:9} {result:6} {time.perf_counter() - begun:7.1f} {peak:>13}  {said}", flush=True)
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N, or cpu for the reduced recipe")
    device = torch.device(parser.parse_args().device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print(f"torch {torch.__version__} sees no GPU here: run this on a machine with one, or with --device cpu.")
        return 2
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    torch.set_float32_matmul_precision("highest")
    is_gpu = device.type == "cuda"
    if is_gpu:
        major, minor = torch.cuda.get_device_capability(device)
        print(f"{torch.cuda.get_device_name(device)}, compute capability {major}.{minor}, torch {torch.__version__}")
    failed = run(Bench.make(GPU if is_gpu else REDUCED, device))
    print(f"{failed} of {len(CHECKS) * len(ALGORITHMS)} checks FAILED." if failed else "All is well.")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
