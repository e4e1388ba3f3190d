"""How the time and the memory of a training step grow with the length of a row, and with the vocabulary.

    python benchmarks/step_time.py                    both algorithms, 10 minutes on one core
    python benchmarks/step_time.py --picture FILE     and a picture of it

One row per step, of which an eighth is its prompt; a drafter of width 192 with 4 heads of 64, 2 of keys and values, as
for the tiny target; random states in place of a target's, so that nothing but the drafter's step is measured: forward,
backward, clipping and Muon, in float32 on one thread. Each size has a process of its own: peak memory is the highest
resident memory above that before the first step.

Growth is the slope between neighbours on logarithmic axes, from the smaller half and from the larger half of the
sizes: 1 where time grows as the size does, 2 where it grows as its square.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from parts.memory import forget_peak, peak_bytes, resident_bytes
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from draftfleet.settings import load
from trainer import algorithms, optimizers
from trainer.targets import Captured, Row

ALGORITHMS = ("eagle3", "dflash")
LENGTHS = (512, 1024, 2048, 4096, 8192)
VOCABULARIES = (2_048, 8_192, 32_768, 65_536, 151_936)
LENGTH, VOCABULARY = 512, 2_048
"""Of the other axis."""

HIDDEN, LAYERS = 192, [1, 3, 4]
BLOCK, TOKENS_PER_ANCHOR = 8, 8
SECONDS, FEWEST = 5.0, 3
"""Steps of a size are repeated for so long, and so often at least."""


@dataclass(frozen=True, slots=True)
class Figure:
    algorithm: str
    length: int
    vocabulary: int
    seconds: float
    """CPU seconds of a step, the median."""
    peak_bytes: int


class RandomTarget:
    """Has what an algorithm asks of a target, and states of no meaning."""

    def __init__(self, vocabulary: int, longest: int) -> None:
        self.layers = LAYERS
        self.device = torch.device("cpu")
        self.config: Any = SimpleNamespace(
            model_type="qwen3", num_hidden_layers=8, hidden_size=HIDDEN, intermediate_size=512, num_attention_heads=4,
            num_key_value_heads=2, head_dim=64, rms_norm_eps=1e-6, max_position_embeddings=longest + BLOCK,
            rope_parameters={"rope_type": "default", "rope_theta": 10_000.0}, bos_token_id=0, eos_token_id=0,
            pad_token_id=0,
        )  # fmt: skip
        self.embedding = torch.randn(vocabulary, HIDDEN)
        self.head = self.embedding
        self.norm_scale = torch.ones(HIDDEN)

    def capture(self, batches: Iterable[list[Row]]) -> Iterator[list[Captured]]:
        for batch in batches:
            yield [self._thought_of(row, len(row.ids)) for row in batch]

    def _thought_of(self, row: Row, tokens: int) -> Captured:
        return Captured(row, torch.randn(tokens, len(LAYERS) * HIDDEN), torch.randn(tokens, HIDDEN))

    def logits(self, last: Tensor) -> Tensor:
        return last @ self.head.T * HIDDEN**-0.5


def measure(algorithm: str, length: int, vocabulary: int) -> Figure:
    """In this process, whose memory must not hold that of an earlier size."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    settings = load(
        flags={
            "trainer.algorithm": algorithm,
            "trainer.optimizer": "muon",
            "dflash.num_layers": 2,
            "dflash.block_size": BLOCK,
            "dflash.mask_token_id": 1,
            "dflash.anchors": length // TOKENS_PER_ANCHOR,
        }
    )
    target = RandomTarget(vocabulary, length)
    trained = algorithms.build(algorithms.configure(settings, target), target)
    weights = [weight for weight in trained.drafter.parameters() if weight.requires_grad]
    optimizer = optimizers.make(settings.trainer, trained.drafter)
    row = Row("row", torch.randint(2, vocabulary, (length,)), torch.arange(length) >= length // 8)
    captured = next(target.capture([[row]]))

    def step() -> None:
        loss = trained.loss(trained.collate(captured))
        (loss.total / loss.weight).backward()
        clip_grad_norm_(weights, settings.trainer.clip)
        optimizer.step()
        optimizer.zero_grad()

    before = resident_bytes()
    forget_peak()
    step()
    peak = peak_bytes() - before
    times: list[float] = []
    while len(times) < FEWEST or sum(times) < SECONDS:
        began = time.process_time()
        step()
        times.append(time.process_time() - began)
    return Figure(algorithm, length, vocabulary, statistics.median(times), peak)


def growth(sizes: list[int], values: list[float]) -> float:
    """The slope of a line through the logarithms, by least squares."""
    x, y = ([math.log(value) for value in values_] for values_ in (sizes, values))
    return statistics.linear_regression(x, y).slope


def table(figures: list[Figure], size: Callable[[Figure], int], what: str) -> str:
    lines = [
        f"| {what} | " + " | ".join(f"{name}, CPU s a step | peak, MB" for name in ALGORITHMS) + " |",
        "|" + "---|" * (1 + 2 * len(ALGORITHMS)),
    ]
    sizes = sorted({size(figure) for figure in figures})
    for one in sizes:
        cells = [
            f"{figure.seconds:.3f} | {figure.peak_bytes / 2**20:,.0f}"
            for name in ALGORITHMS
            for figure in figures
            if (figure.algorithm, size(figure)) == (name, one)
        ]
        lines.append(f"| {one:,} | {' | '.join(cells)} |")
    half = len(sizes) // 2 + 1
    for title, part in (("growth, smaller half", slice(None, half)), ("growth, larger half", slice(-half, None))):
        cells = list[str]()
        for name in ALGORITHMS:
            own = sorted((figure for figure in figures if figure.algorithm == name), key=size)[part]
            cells += [
                f"{growth([size(one) for one in own], [one.seconds for one in own]):.2f}",
                f"{growth([size(one) for one in own], [float(one.peak_bytes) for one in own]):.2f}",
            ]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join(lines)


def in_a_process(algorithm: str, length: int, vocabulary: int) -> Figure:
    argv = [sys.executable, __file__, "--one", algorithm, str(length), str(vocabulary)]
    said = subprocess.run(argv, check=True, capture_output=True, text=True).stdout
    figure = Figure(**json.loads(said.splitlines()[-1]))
    print(f"{algorithm} {length:,} tokens, vocabulary of {vocabulary:,}: {figure.seconds:.3f} s", file=sys.stderr)
    return figure


def main() -> int:
    parser = argparse.ArgumentParser(description="Step time against length and vocabulary.")
    parser.add_argument("--picture", type=Path, help="write a PNG there")
    parser.add_argument("--one", nargs=3, metavar=("ALGORITHM", "LENGTH", "VOCABULARY"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        algorithm, length, vocabulary = arguments.one
        figure = measure(algorithm, int(length), int(vocabulary))
        print(json.dumps({name: getattr(figure, name) for name in Figure.__slots__}))
        return 0
    by_length = [in_a_process(name, length, VOCABULARY) for name in ALGORITHMS for length in LENGTHS]
    by_vocabulary = [in_a_process(name, LENGTH, vocabulary) for name in ALGORITHMS for vocabulary in VOCABULARIES]
    print(table(by_length, lambda figure: figure.length, "tokens of a row"))
    print()
    print(table(by_vocabulary, lambda figure: figure.vocabulary, "vocabulary"))
    if arguments.picture:
        from parts import pictures  # noqa: PLC0415  # matplotlib is needed for this alone

        pictures.growth(
            arguments.picture,
            {
                "tokens of a row": [(one.algorithm, one.length, one.seconds, one.peak_bytes) for one in by_length],
                "vocabulary": [(one.algorithm, one.vocabulary, one.seconds, one.peak_bytes) for one in by_vocabulary],
            },
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
