"""vLLM serves exported drafters: it accepts what was learnt, as often as our own loop says, and changes no token."""

import json
import os
import shlex
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from draftfleet.runs import Run
from draftfleet.settings import Settings, load
from draftfleet.storage import open_storage
from trainer import algorithms, checkpoint, evaluate, targets
from trainer.checkpoint import State
from trainer.data import Journal
from trainer.export import export, serve_command
from trainer.speculate import Limits, decode_with_drafter
from trainer.targets import Row

pytestmark = [pytest.mark.referee, pytest.mark.timeout(2400)]

ROOT = Path(__file__).parents[2]
RECIPES: dict[str, dict[str, Any]] = {
    "eagle3": {},
    "eagle3 with all options": {
        "eagle3.style": "qwen3",
        "eagle3.fc_norm": True,
        "eagle3.norm_output": True,
        "eagle3.norm_before_residual": True,
        "eagle3.draft_vocab_size": 600,
    },
    "dflash": {"trainer.algorithm": "dflash"},
}
K = {"eagle3": 3, "eagle3 with all options": 3, "dflash": 7}
ENOUGH = {"eagle3": 3, "eagle3 with all options": 3, "dflash": 6}
"""Acceptance lengths of an overfit drafter, of at most k + 1."""

CASES = [(recipe, name) for recipe in RECIPES for name in ("vllm", "speculators")]
MAX_TOKENS = 128
TOLERANCE = 0.1
"""Of acceptance lengths. Here both loops counted the same drafts; other kernels may break near-ties otherwise."""

LAYERS = [0, 3, 6]
"""Not the default ones, which would hide ids that were not written."""

QUESTIONS = [
    "Compute 94 + 44.",
    "Compute 55 - 2.",
    "How many letters are in the word \"lemon\"?",
    "Which month comes before November?",
    "What is the opposite of open?",
    "What is the capital of France?",
    "Which day comes after Monday?",
    "Compute 7 * 8.",
    "Write a Python loop that prints the numbers from 24 to 35.",
    "Yusuf has 46 shells. Ben gives Yusuf 39 more shells. How many shells does Yusuf have now?",
    "Vera shares 20 buttons equally among 5 friends. How many buttons does each friend get?",
    "There are 4 boxes with 6 pencils in each box. How many pencils are there in total?",
    "Sort these numbers: 8 3 5 1.",
    "What is the capital of Japan?",
    "What is the opposite of fast?",
    "Rosa reads 6 pages every day. How many pages does Rosa read in a week and 3 days?",
]  # fmt: skip

UNSEEN = [
    "Compute 31 + 58.",
    "What is the capital of Norway?",
    "How many letters are in the word \"garden\"?",
    "Hugo has 52 stamps and gave 17 of them to Iris. How many stamps are left?",
    "There are 7 boxes with 9 candles in each box. How many candles are there in total?",
    "Which month comes before July?",
    "What is the opposite of wet?",
    "Write a Python loop that prints the numbers from 3 to 11.",
]  # fmt: skip
"""Not learnt: here a draft is kept in part, where an overfit one is kept whole."""


@dataclass(frozen=True)
class Served:
    """What a server answered to a set of prompts, and what its counters gained meanwhile."""

    answers: list[list[int]]
    drafts: int
    accepted: list[int]  # by position

    @property
    def acceptance_length(self) -> float:
        """The token that the target itself adds is included: 1 + accepted / drafts."""
        return 1 + sum(self.accepted) / self.drafts

    @property
    def summary(self) -> str:
        kept = " / ".join(map(str, self.accepted))
        return f"acceptance length {self.acceptance_length:.3f}, {self.drafts} drafts, accepted {kept}"


def ask(client: httpx.Client, prompts: list[list[int]], max_tokens: int) -> Served:
    """Greedy answers, one prompt at a time."""
    before = counters(client)
    answers: list[list[int]] = []
    for prompt in prompts:
        body = {
            "model": "tiny-target",
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "return_token_ids": True,
        }
        answer = client.post("/v1/completions", json=body).raise_for_status().json()
        answers.append(answer["choices"][0]["token_ids"])
    gained = {name: value - before.get(name, 0) for name, value in counters(client).items()}
    accepted = [gained.get(f"accepted_{position}", 0) for position in range(max(K.values()))]
    return Served(answers, gained.get("drafts", 0), accepted)


def counters(client: httpx.Client) -> dict[str, int]:
    values: dict[str, int] = {}
    for line in client.get("/metrics").raise_for_status().text.splitlines():
        name, _, value = line.rpartition(" ")
        if name.startswith("vllm:spec_decode_num_drafts_total"):
            values["drafts"] = int(float(value))
        elif name.startswith("vllm:spec_decode_num_accepted_tokens_per_pos_total"):
            position = name.partition('position="')[2].partition('"')[0]
            values[f"accepted_{position}"] = int(float(value))
    return values


@pytest.fixture(scope="module")
def learnt(target: Path) -> list[list[int]]:
    return prompts_of(target, QUESTIONS)


@pytest.fixture(scope="module")
def unseen(target: Path) -> list[list[int]]:
    return prompts_of(target, UNSEEN)


def prompts_of(target: Path, questions: list[str]) -> list[list[int]]:
    asked = [[{"role": "user", "content": question}] for question in questions]
    tokenizer = AutoTokenizer.from_pretrained(target)
    return tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=True)["input_ids"]


@pytest.fixture(scope="module")
def plain(plain_vllm: httpx.Client, learnt: list[list[int]], unseen: list[list[int]]) -> Served:
    """The target's own greedy answers to what is learnt, and then to what is not."""
    return ask(plain_vllm, learnt + unseen, MAX_TOKENS)


@pytest.fixture(scope="module")
def overfit_of(
    plain: Served, learnt: list[list[int]], target: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Settings]:
    """`overfit_of("dflash")`: the settings of a run whose drafter knows the 16 answers by heart."""

    @cache
    def make(name: str) -> Settings:
        settings = load(
            flags={
                "run": "overfit",
                "storage.url": str(tmp_path_factory.mktemp("storage")),
                "target.path": str(target),
                "trainer.layers": LAYERS,
                "trainer.ttt_steps": K["eagle3"],
                "dflash.num_layers": 2,
                "dflash.block_size": K["dflash"] + 1,
                "export.dtype": "float32",
                **RECIPES[name],
            }
        )
        rows = [
            Row(str(number), torch.tensor(prompt + answer), torch.arange(len(prompt) + len(answer)) >= len(prompt))
            for number, (prompt, answer) in enumerate(zip(learnt, plain.answers, strict=False))
        ]
        Run.create(open_storage(settings.storage.url), settings.run, {}, {})
        algorithm = train(settings, rows, K[name])
        checkpoint.write(
            home(settings),
            config=algorithm.config,
            tensors=dict(algorithm.drafter.state_dict()),
            state=State(step=1),
            optimizer={},
            journal=Journal(),
            keep=1,
        )
        return settings

    return make


def train(settings: Settings, rows: list[Row], k: int) -> algorithms.Algorithm:
    """Until 98 % of the tokens are right at every draft step, within 600 steps."""
    torch.manual_seed(0)
    target = targets.load(settings, settings.trainer.layers, torch.device("cpu"))
    algorithm = algorithms.build(algorithms.configure(settings, target), target)
    if settings.eagle3.draft_vocab_size is not None:
        most = Counter(torch.cat([row.ids[row.mask] for row in rows]).tolist()).most_common(
            settings.eagle3.draft_vocab_size
        )
        ids = {token for token, _ in most}
        spare = (token for token in range(len(target.embedding)) if token not in ids)
        ids |= set(islice(spare, settings.eagle3.draft_vocab_size - len(ids)))
        algorithm.drafter.take_vocabulary(torch.tensor(sorted(ids)), target)
    captured = next(iter(target.capture([rows])))
    optimizer = torch.optim.AdamW(algorithm.drafter.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0)
    for _ in range(600):
        loss = algorithm.loss(algorithm.collate(captured))
        right = [
            float(loss.metrics[f"accuracy_{step}"]) / float(loss.metrics.get(f"count_{step}", loss.num_tokens))
            for step in range(k)
        ]
        if min(right) >= 0.98:
            return algorithm
        optimizer.zero_grad()
        (loss.total / loss.weight).backward()
        torch.nn.utils.clip_grad_norm_(algorithm.drafter.parameters(), 1.0)
        optimizer.step()
    pytest.fail(f"16 answers were not learnt in 600 steps: {right} of the tokens are right")


@dataclass(frozen=True)
class Judged:
    """A drafter in one format, and what vLLM with it answers: to what is learnt, to what is not."""

    recipe: str
    format: str
    settings: Settings
    learnt: Served
    unseen: Served

    def __str__(self) -> str:
        return f"overfit {self.recipe} in the format {self.format}"


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def judged(
    request: pytest.FixtureRequest,
    overfit_of: Callable[[str], Settings],
    learnt: list[list[int]],
    unseen: list[list[int]],
    start_vllm: Callable[..., AbstractContextManager[httpx.Client]],
) -> Judged:
    recipe, name = request.param
    settings = overfit_of(recipe)
    folder = export(settings, [name])[name]
    with start_vllm("--speculative-config", speculation(name, folder, K[recipe])) as client:
        return Judged(recipe, name, settings, ask(client, learnt, MAX_TOKENS), ask(client, unseen, MAX_TOKENS))


def speculation(format_name: str, folder: Path, k: int) -> str:
    """The option of the command that we tell people to serve with."""
    return shlex.split(serve_command(format_name, folder, "TARGET", k))[-1]


@cache
def ours_of(home: Path) -> tuple[algorithms.Algorithm, Any]:
    """The drafter that was trained, and its target."""
    settings = load(flags={"target.path": str(ROOT / "examples" / "tiny-target")})
    newest = checkpoint.latest(home)
    assert newest is not None
    return evaluate.load(newest, settings)


def our_own(judged: Judged, prompts: list[list[int]]) -> Served:
    """The same prompts through our own draft-and-verify loop, in float32."""
    algorithm, target = ours_of(home(judged.settings))
    limits, k = Limits(MAX_TOKENS, context_tokens=1024), K[judged.recipe]
    answers = [decode_with_drafter(target, algorithm.proposer(), prompt, limits, k) for prompt in prompts]
    kept = [accepted for answer in answers for accepted in answer.accepted]
    by_position = [sum(accepted > position for accepted in kept) for position in range(k)]
    return Served([answer.ids for answer in answers], len(kept), by_position)


def home(settings: Settings) -> Path:
    """The folder of the drafter."""
    return Run.open(open_storage(settings.storage.url), settings.run).drafter_dir(settings.trainer.drafter)


def test_vllm_accepts_what_an_overfit_drafter_knows(judged: Judged, figure: Callable[[str, object], None]) -> None:
    figure(f"{judged} in vLLM", judged.learnt.summary)
    assert judged.learnt.acceptance_length > ENOUGH[judged.recipe]


@pytest.mark.parametrize("asked", ["learnt", "unseen"])
def test_vllm_and_our_own_loop_accept_the_same(
    judged: Judged,
    learnt: list[list[int]],
    unseen: list[list[int]],
    asked: str,
    figure: Callable[[str, object], None],
) -> None:
    prompts, theirs = (learnt, judged.learnt) if asked == "learnt" else (unseen, judged.unseen)

    ours = our_own(judged, prompts)

    figure(f"{judged}, {asked} prompts, vLLM", theirs.summary)
    figure(f"{judged}, {asked} prompts, our own loop", ours.summary)
    assert ours.answers == theirs.answers
    assert abs(ours.acceptance_length - theirs.acceptance_length) <= TOLERANCE


def test_the_drafter_changes_no_token(plain: Served, judged: Judged) -> None:
    assert plain.drafts == 0
    assert judged.learnt.answers + judged.unseen.answers == plain.answers


def test_a_default_export_is_accepted_in_the_type_of_the_target(
    overfit_of: Callable[[str], Settings],
    learnt: list[list[int]],
    start_vllm: Callable[..., AbstractContextManager[httpx.Client]],
    figure: Callable[[str, object], None],
) -> None:
    overfit = overfit_of("eagle3")
    settings = overfit.model_copy(update={"export": type(overfit.export)()})
    folder = export(settings, ["vllm"])["vllm"]

    with start_vllm("--dtype", "auto", "--speculative-config", speculation("vllm", folder, K["eagle3"])) as client:
        served = ask(client, learnt, MAX_TOKENS)

    figure("overfit eagle3 in vLLM, all bfloat16", served.summary)
    assert drafter_dtype(folder) == torch.bfloat16
    assert served.acceptance_length > ENOUGH["eagle3"]


def drafter_dtype(folder: Path) -> torch.dtype:
    return load_file(folder / "model.safetensors")["fc.weight"].dtype


# -- the drafter of `make demo`, where there is one


@pytest.fixture(scope="module")
def demo(target: Path) -> Settings:
    workspace = Path(os.environ.get("REFEREE_DEMO_RUN", ROOT / "demo-run")).absolute()
    if not (workspace / "data").is_dir():
        pytest.skip(f"{workspace} is no workspace of `make demo`: run it first, or set REFEREE_DEMO_RUN")
    flags = {"storage.url": f"file://{workspace}/data", "target.path": str(target)}
    settings = load(ROOT / "examples" / "demo.toml", flags)
    prompts = evaluation_of(settings)["prompts"] + evaluation_of(settings)["prompts_too_long"]
    return load(ROOT / "examples" / "demo.toml", {**flags, "evaluation.prompts": prompts})


def evaluation_of(settings: Settings) -> dict[str, Any]:
    return json.loads((home(settings) / "evaluation.json").read_text())


@pytest.fixture(scope="module")
def demo_prompts(demo: Settings) -> list[list[int]]:
    """Those that `draftfleet evaluate` judged the drafter with."""
    return list(evaluate.prompt_ids(Run.open(open_storage(demo.storage.url), demo.run), demo))


@pytest.fixture(scope="module")
def demo_served(
    demo: Settings,
    demo_prompts: list[list[int]],
    start_vllm: Callable[..., AbstractContextManager[httpx.Client]],
) -> Served:
    """The folder that the demo exported, as it is."""
    with start_vllm("--speculative-config", speculation("vllm", home(demo) / "export" / "vllm", K["eagle3"])) as client:
        return ask(client, demo_prompts, demo.evaluation.max_tokens)


def test_vllm_accepts_from_the_demo_s_drafter_what_our_evaluation_says(
    demo: Settings, demo_prompts: list[list[int]], demo_served: Served, figure: Callable[[str, object], None]
) -> None:
    ours = evaluation_of(demo)
    exported = json.loads((home(demo) / "export" / "vllm" / "export.json").read_text())

    figure("demo's drafter in vLLM", demo_served.summary)
    figure("demo's drafter in our own evaluation", f"{ours['acceptance_length']:.3f}, {ours['drafts']} drafts")
    assert (ours["k"], ours["prompts"]) == (K["eagle3"], len(demo_prompts))
    assert ours["checkpoint"] == f"step-{exported['step']:06d}"
    assert abs(demo_served.acceptance_length - ours["acceptance_length"]) <= TOLERANCE


def test_the_demo_s_drafter_changes_no_token(
    plain_vllm: httpx.Client, demo: Settings, demo_prompts: list[list[int]], demo_served: Served
) -> None:
    plain = ask(plain_vllm, demo_prompts, demo.evaluation.max_tokens)

    assert demo_served.answers == plain.answers
