"""A run in a folder, samples made to measure, and a target and an algorithm small enough to train in milliseconds."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from draftfleet import tokens
from draftfleet.names import split_of
from draftfleet.records import Prompt, Sample
from draftfleet.runs import Run
from draftfleet.settings import Trainer, load
from draftfleet.storage import FileStorage
from trainer import targets
from trainer.algorithms import Loss
from trainer.drafter import DrafterConfig
from trainer.speculate import Limits, decode_batch
from trainer.targets import Captured, Row

VOCAB = 32


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run.create(FileStorage(tmp_path / "storage"), "toy", {"target.model": "toy-target"}, {})


@pytest.fixture
def knobs() -> Trainer:
    return Trainer(
        drafter="d", max_steps=12, batch_tokens=64, max_length=48, lr=0.05, warmup=0.1, log_steps=2,
        checkpoint_steps=5, poll_s=0.01, device="cpu",
    )  # fmt: skip


@dataclass
class Samples:
    """Puts batches of made samples into a run: prompts first, as the producer does, then their shard."""

    run: Run

    def make(self, batch: str, key: str, **changes: Any) -> Sample:
        dice = random.Random(key)
        ids = [dice.randrange(VOCAB) for _ in range(dice.randrange(6, 30))]
        fields: dict[str, Any] = {
            "run_id": self.run.run_id,
            "run": self.run.name,
            "batch": batch,
            "row_key": key,
            "prompt_id": key,
            "split": split_of(batch),
            "messages": [{"role": "user", "content": key}],
            "outcome": "ok",
            "prompt_token_ids": [1, 2],
            "token_ids": ids,
            "ids_source": "engine",
            "completion_tokens": len(changes.get("token_ids", ids)),
        }
        return Sample(**(fields | changes))

    def prompts(self, batch: str, num_rows: int) -> list[str]:
        keys = [f"{batch}-row{row}" for row in range(num_rows)]
        self.run.write_prompts(
            batch, [Prompt(key, split_of(batch), [{"role": "user", "content": key}]) for key in keys]
        )
        return keys

    def put(self, batch: str, num_rows: int = 12) -> list[str]:
        """Prompts and shard of a batch in one go. Returns the row keys."""
        keys = self.prompts(batch, num_rows)
        self.run.commit(batch, [self.make(batch, key) for key in keys])
        return keys

    def corrupt(self, batch: str) -> None:
        self.run.storage.put(f"{self.run.name}/samples/{batch}.parquet", b"PAR1 torn")


@pytest.fixture
def samples(run: Run) -> Samples:
    return Samples(run)


class ToyTarget:
    """Its hidden state is the embedding of the token; `layers` and `logits` as the protocol asks."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.layers = [0]
        self.config = SimpleNamespace()
        self.embedding = torch.randn(VOCAB, 8, generator=torch.Generator().manual_seed(0))
        self.seen: list[list[str]] = []
        self.on_batch: Callable[[int], None] = lambda _: None

    def capture(self, batches: Iterable[list[Row]]) -> Iterator[list[Captured]]:
        for rows in batches:
            self.seen.append([row.key for row in rows])
            self.on_batch(len(self.seen))
            yield [Captured(row, self.embedding[row.ids], self.embedding[row.ids]) for row in rows]

    def logits(self, last: Tensor) -> Tensor:
        return last @ self.embedding.T


class ToyAlgorithm:
    """Predicts the next token from one hidden state; drops out at random, so that random states matter."""

    config = DrafterConfig(
        algorithm="toy", target="toy-target", layers=[0], num_target_layers=1, target_hidden_size=8, vocab_size=VOCAB,
        hidden_size=8, intermediate_size=8, num_attention_heads=1, num_key_value_heads=1, head_dim=8, hidden_act="silu",
        rms_norm_eps=1e-6, max_position_embeddings=64, rope_parameters={},
    )  # fmt: skip

    def __init__(self, dropout: float) -> None:
        self.drafter = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Dropout(dropout), nn.Linear(16, VOCAB))

    def collate(self, captured: list[Captured]) -> list[Captured]:
        return captured

    def loss(self, layout: list[Captured]) -> Loss:
        hidden = torch.cat([one.hidden[:-1][one.row.mask[1:]] for one in layout])
        labels = torch.cat([one.row.ids[1:][one.row.mask[1:]] for one in layout])
        logits = self.drafter(hidden)
        total = nn.functional.cross_entropy(logits, labels, reduction="sum")
        correct = (logits.argmax(-1) == labels).sum()
        return Loss(total, len(labels), len(labels), {"loss_0": total.detach(), "accuracy_0": correct})

    def proposer(self) -> Any:
        raise NotImplementedError("nothing here drafts")


@pytest.fixture
def toy_target() -> ToyTarget:
    return ToyTarget()


@pytest.fixture
def toy_algorithm() -> Callable[..., ToyAlgorithm]:
    def make(dropout: float = 0.2) -> ToyAlgorithm:
        torch.manual_seed(7)
        random.seed(7)
        return ToyAlgorithm(dropout)

    return make


Answered = list[tuple[list[dict[str, str]], list[int], list[int]]]


@pytest.fixture(scope="session")
def answered_sums() -> Answered:
    """Twelve questions, each with its prompt ids and the tiny target's answer."""
    tiny = str(Path(__file__).parents[2] / "examples" / "tiny-target")
    target: Any = targets.load(load(flags={"target.path": tiny}), [1], torch.device("cpu"))
    tokenizer = tokens.load(tiny)
    asked = [[{"role": "user", "content": f"What is {a} + 4?"}] for a in range(2, 14)]
    prompts = [tokenizer.prompt_ids(messages, None, True, None) for messages in asked]
    return list(zip(asked, prompts, decode_batch(target, prompts, Limits(24, 1024)), strict=True))


@pytest.fixture
def put_sums(answered_sums: Answered) -> Callable[[Run, str, slice], None]:
    """Put some of them into a run as a batch with its shard."""

    def put(run: Run, batch: str, part: slice) -> None:
        keys = {f"{batch}-{number}": one for number, one in enumerate(answered_sums[part])}
        split = split_of(batch)
        run.write_prompts(batch, [Prompt(key, split, messages) for key, (messages, _, _) in keys.items()])
        run.commit(
            batch,
            [
                Sample(
                    run_id=run.run_id, run=run.name, batch=batch, row_key=key, prompt_id=key, split=split,
                    messages=messages, outcome="ok", prompt_token_ids=prompt, token_ids=answer, ids_source="engine",
                    completion_tokens=len(answer),
                )
                for key, (messages, prompt, answer) in keys.items()
            ],
        )  # fmt: skip

    return put
