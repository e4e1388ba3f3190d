"""`draftfleet bench` between two real vLLM servers: its acceptance is what they count, and what we evaluate."""

import json
import shlex
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoTokenizer

from draftfleet.names import batch_id
from draftfleet.records import Prompt, prompt_id
from draftfleet.runs import Run
from draftfleet.settings import Settings, load
from draftfleet.storage import open_storage
from trainer import algorithms, checkpoint, evaluate, targets
from trainer.checkpoint import State
from trainer.data import Journal
from trainer.export import export, serve_command
from trainer.targets import Row

pytestmark = [pytest.mark.referee, pytest.mark.timeout(2400)]

K = 3
STEPS = 40
"""Enough to draft well what was learnt, and some of what was not."""
MAX_TOKENS = 64
NUM_PROMPTS = 8
LEARNT = [f"Compute {number + 11} + {97 - 3 * number}." for number in range(8)]
ASKED = LEARNT[:4] + [f"Compute {number + 31} + {58 - number}." for number in range(4)]
TOLERANCE = 0.1
"""Of acceptance lengths: several requests at once are summed in another order, and a near tie may fall otherwise."""


@dataclass(frozen=True)
class Benched:
    """What the command said, and what the counters of the server with the drafter gained meanwhile."""

    report: dict[str, Any]
    counted: dict[str, float]
    ours: dict[str, Any]


@pytest.fixture(scope="module")
def drafter(plain_vllm: httpx.Client, target: Path, tmp_path_factory: pytest.TempPathFactory) -> Settings:
    """A run with held-out prompts and an EAGLE-3 drafter that learnt the answers to half of them."""
    settings = load(
        flags={
            "run": "bench",
            "storage.url": str(tmp_path_factory.mktemp("storage")),
            "target.path": str(target),
            "target.model": "tiny-target",
            "trainer.layers": [0, 3, 6],
            "trainer.ttt_steps": K,
            "evaluation.k": K,
            "evaluation.prompts": NUM_PROMPTS,
            "evaluation.max_tokens": MAX_TOKENS,
            "export.dtype": "float32",
        }
    )
    run = Run.create(open_storage(settings.storage.url), settings.run, {"target.model": "tiny-target"}, {})
    asked = [[{"role": "user", "content": question}] for question in ASKED]
    run.write_prompts(batch_id("heldout", 0), [Prompt(prompt_id(one, None), "heldout", one) for one in asked])
    algorithm = train(settings, rows(plain_vllm, target))
    checkpoint.write(
        run.drafter_dir(settings.trainer.drafter),
        config=algorithm.config,
        tensors=dict(algorithm.drafter.state_dict()),
        state=State(step=1),
        optimizer={},
        journal=Journal(),
        keep=1,
    )
    return settings


def rows(client: httpx.Client, target: Path) -> list[Row]:
    """What the target says, by its ids."""
    tokenizer = AutoTokenizer.from_pretrained(target)
    conversations = [[{"role": "user", "content": question}] for question in LEARNT]
    prompts = tokenizer.apply_chat_template(conversations, add_generation_prompt=True, return_dict=True)["input_ids"]
    made: list[Row] = []
    for number, prompt in enumerate(prompts):
        body = {"model": "tiny-target", "prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0}
        answer = client.post("/v1/completions", json={**body, "return_token_ids": True}).raise_for_status().json()
        ids = [*prompt, *answer["choices"][0]["token_ids"]]
        made.append(Row(str(number), torch.tensor(ids), torch.arange(len(ids)) >= len(prompt)))
    return made


def train(settings: Settings, rows: list[Row]) -> algorithms.Algorithm:
    torch.manual_seed(0)
    target = targets.load(settings, settings.trainer.layers, torch.device("cpu"))
    algorithm = algorithms.build(algorithms.configure(settings, target), target)
    captured = next(iter(target.capture([rows])))
    optimizer = torch.optim.AdamW(algorithm.drafter.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0)
    for _ in range(STEPS):
        loss = algorithm.loss(algorithm.collate(captured))
        optimizer.zero_grad()
        (loss.total / loss.weight).backward()
        torch.nn.utils.clip_grad_norm_(algorithm.drafter.parameters(), 1.0)
        optimizer.step()
    return algorithm


@pytest.fixture(scope="module")
def benched(
    plain_vllm: httpx.Client,
    drafter: Settings,
    start_vllm: Callable[..., AbstractContextManager[httpx.Client]],
    figure: Callable[[str, object], None],
) -> Benched:
    ours = json.loads(evaluate.evaluate(drafter, progress=False).to_json())
    folder = export(drafter, ["vllm"])["vllm"]
    speculation = shlex.split(serve_command("vllm", folder, "TARGET", K))[-1]
    with start_vllm("--speculative-config", speculation) as client:
        before = counters(client)
        result = subprocess.run(
            [
                *(sys.executable, "-m", "draftfleet", "bench", "--json"),
                *("--with", str(client.base_url), "--without", str(plain_vllm.base_url)),
                *("--run", drafter.run, "--storage", drafter.storage.url),
                *("--concurrency", "1,8", "--limit", str(NUM_PROMPTS), "--max-tokens", str(MAX_TOKENS)),
            ],
            capture_output=True,
            text=True,
            timeout=1200,
            check=False,
        )
        after = counters(client)
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    for level in report["levels"]:
        one, other, ratio = level["with_drafter"], level["without"], level["speedup"]
        figure(
            f"bench at {level['concurrency']}",
            f"x{ratio['median']:.2f} ({ratio['least']:.2f} to {ratio['most']:.2f}), "
            f"{one['tokens_per_s']['median']:.1f} and {other['tokens_per_s']['median']:.1f} tokens/s, "
            f"acceptance length {one['acceptance_length']:.3f}, {level['equal']} of {level['compared']} equal",
        )
    return Benched(report, {name: value - before.get(name, 0) for name, value in after.items()}, ours)


def counters(client: httpx.Client) -> dict[str, float]:
    names = [f"vllm:spec_decode_num_{name}_total" for name in ("drafts", "draft_tokens", "accepted_tokens")]
    lines = client.get("/metrics").raise_for_status().text.splitlines()
    return {name: float(line.rpartition(" ")[2]) for name in names for line in lines if line.startswith(f"{name}{{")}


def test_the_acceptance_is_what_the_server_counted(benched: Benched) -> None:
    """All of it, but for the warm-ups."""
    said = benched.report["acceptance"]
    levels = [level["with_drafter"] for level in benched.report["levels"]]

    assert said["source"] == "counters"
    assert 0 < benched.counted["vllm:spec_decode_num_drafts_total"] - said["drafts"] <= 9 * 16
    assert said["acceptance_length"] == pytest.approx(1 + said["accepted"] / said["drafts"])
    assert said["drafted"] == pytest.approx(K * said["drafts"], rel=0.02)  # fewer at the end of an answer
    assert sum(said["per_position"]) == said["accepted"]
    assert said["per_position"] == sorted(said["per_position"], reverse=True)
    assert [(level["requests"], level["windows"]) for level in levels] == [(NUM_PROMPTS, 3)] * 2


def test_the_acceptance_is_that_of_our_own_evaluation(benched: Benched, figure: Callable[[str, object], None]) -> None:
    alone = benched.report["levels"][0]["with_drafter"]
    figure("bench, acceptance length alone", alone["acceptance_length"])
    figure("the same drafter in our own evaluation", benched.ours["acceptance_length"])

    assert benched.ours["lossless"]
    assert 1.2 < benched.ours["acceptance_length"] < K + 1
    assert abs(alone["acceptance_length"] - benched.ours["acceptance_length"]) <= TOLERANCE


def test_answers_are_equal_or_part_at_a_near_tie(benched: Benched) -> None:
    report = benched.report

    assert report["levels"][0]["equal"] == report["levels"][0]["compared"] == 3 * NUM_PROMPTS
    assert all(one["gap"] is not None and one["gap"] < 0.05 for one in report["differences"])


def test_nobody_else_asked_and_the_figures_are_kept_beside_the_drafter(benched: Benched, drafter: Settings) -> None:
    home = Path(drafter.storage.url) / drafter.run / "drafters" / drafter.trainer.drafter

    assert benched.report["warnings"] == []
    assert benched.report["error"] is None
    assert json.loads((home / "bench.json").read_text()) == benched.report
