"""This project's trainer beside that of speculators 0.9.0, step by step on the same rows, judged by real vLLM.

    make referee                      makes .venv-referee with vLLM, and .venv-speculators
    python benchmarks/race.py         all of it, three hours on two quiet cores; what race-run/ holds is not done again
    python benchmarks/race.py steps   one part

    data     177,000 tokens of the tiny target's greedy answers, with its states, for both to read
    tune     as many recipes of each trainer on one seed, by what drafters keep on the tuning prompts, in our own loop
    steps    the two trainers take turns, five steps each: CPU and wall seconds of a step, highest memory
    profile  where the time of a step goes
    train    three seeds of each one's best recipe, to the same number of tokens; folders that vLLM serves
    judge    vLLM serves each of them: what it accepts on prompts that no training and no choice saw
    speed    vLLM with each drafter of seed 0, and alone, one request at a time and eight
    curve    acceptance of seed 0's drafters on the way, in our own loop
    page     what was measured, as the tables of benchmarks/results/race_*.md and as pictures

Same target, layers, drafter sizes, rows, order of rows, tokens, threads (1) and float32. Tokens are those of rows,
padding is not counted. A step is forward, backward, clipping and the optimizer; each trainer's own packing of rows is
not in it, but for what ours does in `collate`, which is.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Any

from parts import race_data, race_own_loop, race_page, race_vllm
from parts.race_order import Order
from parts.race_rows import Rows

ROOT = Path(__file__).parents[1]
PARTS = Path(__file__).parent / "parts"
WORK = ROOT / "race-run"
RESULTS = WORK / "results.jsonl"
PICTURE = ROOT / "docs" / "pictures" / "acceptance.png"
TARGET = race_data.TARGET
MARK = "<!-- written by `benchmarks/race.py page` -->"

SIDES = ("draftfleet", "speculators")
ALGORITHMS = ("eagle3", "dflash")
K = {"eagle3": 3, "dflash": 7}
BUDGET = {"eagle3": 417_000, "dflash": 704_000}
"""Training tokens: those of the single runs of speculators that were there before."""

SEEDS = (0, 1, 2)
MUON = {"trainer.optimizer": "muon", "trainer.schedule": "linear", "trainer.warmup": 0.01, "trainer.clip": 1.0}
EAGLE3 = MUON | {
    "trainer.step_decay": 1.0,
    "eagle3.head": "frozen",
    "eagle3.norm_output": True,
    "eagle3.norm_before_fc": True,
}
RECIPES: dict[str, dict[str, dict[str, dict[str, Any]]]] = {
    "draftfleet": {
        "eagle3": {f"Muon {rate}": EAGLE3 | {"trainer.lr": float(rate)} for rate in ("5e-3", "3.5e-3", "7e-3")}
        | {"Muon 3.5e-3, residual normed": EAGLE3 | {"trainer.lr": 0.0035, "eagle3.norm_before_residual": True}},
        "dflash": {f"Muon {rate}": MUON | {"trainer.lr": float(rate)} for rate in ("5e-3", "3e-3", "8e-3", "1.2e-2")},
    },
    "speculators": {
        "eagle3": {
            "Muon 4e-3": {"muon_lr": 0.004},
            "Muon 2.5e-3": {"muon_lr": 0.0025},
            "as shipped, Muon 1e-3": {},
            "Muon 2.5e-3, residual not normed": {"muon_lr": 0.0025, "norm_before_residual": False},
        },
        "dflash": {
            "Muon 5e-3": {"muon_lr": 0.005},
            "Muon 3e-3": {"muon_lr": 0.003},
            "Muon 8e-3": {"muon_lr": 0.008},
            "as shipped, Muon 1e-3": {},
        },
    },
}
"""As many of each side. The best on the tuning prompts is the one that is judged, on others."""

TURN = 5
"""Steps before the other's turn."""

CURVE = 8
"""Folders of one training, evenly over it, for acceptance against tokens. Of seed 0."""

GROUP = 8
"""Judged prompts that are asked, and counted, together: both trainers are compared group by group."""

MAX_TOKENS = 256
CONCURRENCY = (1, 8)
REPEATS = 3


class Child:
    """A trainer that takes orders: parts/race_child.py."""

    def __init__(self, side: str, order: Order) -> None:
        python, script = {
            "draftfleet": (sys.executable, "race_ours.py"),
            "speculators": (
                os.environ.get("SPECULATORS_PYTHON", str(ROOT / ".venv-speculators/bin/python")),
                "race_theirs.py",
            ),
        }[side]
        if not Path(python).exists():
            sys.exit(f"{python} is not there: `make referee` makes it, or SPECULATORS_PYTHON names another.")
        self._side = side
        with (WORK / f"{side}.log").open("a") as log:
            self._process = subprocess.Popen(
                [python, str(PARTS / script), order.to_json()],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
            )
        self.ready = self._read()

    def ask(self, **order: Any) -> dict[str, Any]:
        assert self._process.stdin
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            sys.exit(f"the trainer of {self._side} ended with {self._process.wait()}: see {WORK}/{self._side}.log")
        return json.loads(line)


# -- what was measured


def results() -> list[dict[str, Any]]:
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


def found(**wanted: Any) -> list[dict[str, Any]]:
    return [row for row in results() if all(row.get(name) == value for name, value in wanted.items())]


def keep(**row: Any) -> None:
    with RESULTS.open("a") as file:
        file.write(json.dumps(row | {"at": time.strftime("%Y-%m-%d %H:%M")}) + "\n")
    print(json.dumps({name: value for name, value in row.items() if name != "turns"}), file=sys.stderr)


# -- the parts


def data() -> None:
    race_data.make(WORK, tokens=176_000, longest=512, layers=Order("", "", "", 0, 0).layers)


def steps(algorithm: str) -> None:
    """Both with Muon and with AdamW, whose steps cost differently; the same for both sides."""
    for name in ("muon", "adamw"):
        if found(part="steps", algorithm=algorithm, optimizer=name):
            continue
        optimizer = {"draftfleet": {"trainer.optimizer": name}, "speculators": {"optimizer": name}}
        recipes = {side: recipe(algorithm, side) | optimizer[side] for side in SIDES}
        turns = _in_turns(algorithm, recipes, num_steps=102, before=2)
        keep(part="steps", algorithm=algorithm, optimizer=name, **turns)


def profile(algorithm: str) -> None:
    for side in SIDES:
        if not found(part="profile", algorithm=algorithm, side=side):
            order = Order(algorithm, str(TARGET), str(WORK), 0, 100, recipe=recipe(algorithm, side))
            child = Child(side, order)
            child.ask(steps=3)
            keep(part="profile", algorithm=algorithm, side=side, ms=child.ask(profile=10))
            child.close()


def tune(algorithm: str) -> None:
    """Every recipe on seed 0, by what its drafter keeps on the tuning prompts, in our own loop."""
    prompts = json.loads((WORK / "tuning.json").read_text())
    for side in SIDES:
        for name in RECIPES[side][algorithm]:
            trained = _trained(algorithm, side, name, seed=0)
            wanted = {"algorithm": algorithm, "side": side, "recipe": name}
            if not found(part="tune", **wanted):
                length = race_own_loop.acceptance(served(trained), str(TARGET), prompts, K[algorithm], MAX_TOKENS)
                keep(part="tune", **wanted, acceptance=length)


def train(algorithm: str) -> None:
    for seed in SEEDS:
        for side in SIDES:
            _trained(algorithm, side, chosen(algorithm, side), seed)


def chosen(algorithm: str, side: str) -> str:
    """The name of the recipe that was the best on the tuning prompts."""
    tuned = found(part="tune", algorithm=algorithm, side=side)
    if len(tuned) < len(RECIPES[side][algorithm]):
        sys.exit(f"not all recipes of {side} for {algorithm} are there to choose from: run the part `tune` first.")
    return max(tuned, key=lambda row: row["acceptance"])["recipe"]


def recipe(algorithm: str, side: str) -> dict[str, Any]:
    return RECIPES[side][algorithm][chosen(algorithm, side)]


def judged(algorithm: str) -> list[dict[str, Any]]:
    """What is kept of the trainings with the chosen recipes, as many of them as are there."""
    return [
        row for side in SIDES
        for row in found(part="train", algorithm=algorithm, side=side, recipe=chosen(algorithm, side))
    ]  # fmt: skip


def _trained(algorithm: str, side: str, name: str, seed: int) -> dict[str, Any]:
    """What is kept of this training, which is done if it has not been. Seed 0 leaves folders of its way as well."""
    wanted = {"algorithm": algorithm, "side": side, "recipe": name, "seed": seed}
    if there := found(part="train", **wanted):
        return there[0]
    num_steps = steps_for(BUDGET[algorithm], seed)
    marks = [num_steps * n // CURVE for n in range(1, CURVE + 1)] if seed == 0 else [num_steps]
    given = RECIPES[side][algorithm][name]
    child = Child(side, Order(algorithm, str(TARGET), str(WORK), seed, num_steps, recipe=given))
    tokens, cpu_s, at, done = 0, 0.0, list[int](), 0
    for mark in marks:
        said = child.ask(steps=mark - done)
        tokens, cpu_s, done = tokens + said["tokens"], cpu_s + said["cpu_s"], mark
        at.append(tokens)
        folder = served(wanted | {"marks": [mark]}).parent
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        child.ask(save=str(folder))
    peak = child.ask(memory=True)["peak_bytes"]
    child.close()
    keep(part="train", **wanted, given=given, tokens=tokens, cpu_s=cpu_s, peak_bytes=peak, marks=marks, tokens_at=at)
    return found(part="train", **wanted)[0]


def judge(algorithm: str) -> None:
    """Each drafter of the chosen recipes in vLLM, on prompts that chose nothing."""
    prompts = json.loads((WORK / "judged.json").read_text())
    for trained in judged(algorithm):
        wanted = {name: trained[name] for name in ("algorithm", "side", "recipe", "seed")}
        if found(part="judge", **wanted):
            continue
        with race_vllm.server(TARGET, WORK / "vllm.log", served(trained), algorithm, K[algorithm]) as server:
            groups = [
                race_vllm.ask(server, prompts[start : start + GROUP], max_tokens=MAX_TOKENS, concurrency=GROUP)
                for start in range(0, len(prompts), GROUP)
            ]
        keep(part="judge", **wanted, trained_tokens=trained["tokens"], **race_vllm.row_of(groups))


def curve(algorithm: str) -> None:
    """The drafters on the way of seed 0, on the tuning prompts, in our own loop: a dozen starts of vLLM less."""
    prompts = json.loads((WORK / "tuning.json").read_text())
    for trained in judged(algorithm):
        marks = list(zip(trained["marks"], trained["tokens_at"], strict=True))
        for mark, tokens in marks[1::2] if trained["seed"] == 0 else []:
            wanted = {"algorithm": algorithm, "side": trained["side"], "step": mark}
            if not found(part="curve", **wanted):
                folder = served(trained | {"marks": [mark]})
                length = race_own_loop.acceptance(folder, str(TARGET), prompts, K[algorithm], MAX_TOKENS)
                keep(part="curve", **wanted, trained_tokens=tokens, acceptance=length)


def speed(algorithm: str) -> None:
    """All three servers are up and take turns, so that a busy minute of the machine is no server's own."""
    prompts = json.loads((WORK / "judged.json").read_text())
    trained = [row for row in judged(algorithm) if row["seed"] == 0]
    if found(part="speed", algorithm=algorithm):
        return
    with ExitStack() as stack:
        servers = {"alone": stack.enter_context(race_vllm.server(TARGET, WORK / "vllm-alone.log"))}
        for row in trained:
            log = WORK / f"vllm-{row['side']}.log"
            one = race_vllm.server(TARGET, log, served(row), algorithm, K[algorithm])
            servers[row["side"]] = stack.enter_context(one)
        for server in servers.values():
            race_vllm.ask(server, prompts[:4], max_tokens=32, concurrency=4)
        rates: dict[str, dict[str, dict[str, list[float]]]] = {
            who: {str(n): {"wall": [], "cpu": []} for n in CONCURRENCY} for who in servers
        }
        for _ in range(REPEATS):
            for concurrency in CONCURRENCY:
                for who, server in servers.items():
                    answered = race_vllm.ask(server, prompts, max_tokens=MAX_TOKENS, concurrency=concurrency)
                    rates[who][str(concurrency)]["wall"].append(answered.tokens / answered.seconds)
                    rates[who][str(concurrency)]["cpu"].append(answered.tokens / answered.cpu_s)
    keep(part="speed", algorithm=algorithm, tokens_per_s=rates)


def _in_turns(algorithm: str, recipes: dict[str, dict[str, Any]], *, num_steps: int, before: int) -> dict[str, Any]:
    """Both sides to `num_steps`, `TURN` steps at a time, the first of a pair by turns; `before` are not counted.

    Returns by side tokens, seconds and highest memory, and the ratios of CPU and wall seconds, pair by pair.
    """
    children = {
        side: Child(side, Order(algorithm, str(TARGET), str(WORK), 0, num_steps, recipe=recipes[side]))
        for side in SIDES
    }
    totals: dict[str, dict[str, float]] = {side: {"tokens": 0, "wall_s": 0.0, "cpu_s": 0.0} for side in SIDES}
    pairs: list[dict[str, float]] = []
    for child in children.values():
        child.ask(steps=before)
    for _ in range((num_steps - before) // TURN):
        turn = {side: children[side].ask(steps=TURN) for side in SIDES[:: 1 if len(pairs) % 2 else -1]}
        for side, one in turn.items():
            totals[side] = {name: total + one[name] for name, total in totals[side].items()}
        pairs.append({name: turn["speculators"][name] / turn["draftfleet"][name] for name in ("cpu_s", "wall_s")})
    peaks = {side: child.ask(memory=True)["peak_bytes"] for side, child in children.items()}
    for child in children.values():
        child.close()
    return {
        "steps": TURN * len(pairs),
        "sides": {side: totals[side] | {"peak_bytes": peaks[side]} for side in SIDES},
        "ratios": {name: [round(pair[name], 3) for pair in pairs] for name in ("cpu_s", "wall_s")},
    }


def served(trained: dict[str, Any]) -> Path:
    """The folder that vLLM serves, after the last of this training's marks."""
    recipe = re.sub(r"[^a-z0-9]+", "-", trained["recipe"].lower()).strip("-")
    name = f"{trained['algorithm']}-{trained['side']}-{recipe}-{trained['seed']}-{trained['marks'][-1]:05}"
    return WORK / "drafters" / name / "served"


def steps_for(tokens: int, seed: int) -> int:
    """Steps that train on at least so many tokens."""
    rows, total = Rows(WORK), 0
    for step, (_, numbers) in enumerate(rows.batches(seed, Order("", "", "", 0, 0).batch_tokens), start=1):
        total += sum(map(rows.length, numbers))
        if total >= tokens:
            return step
    raise AssertionError("batches have no end")


def page(into: Path | None) -> None:
    """The tables on standard output, or in a page below the line that says so; the picture into the docs."""
    tables = race_page.tables(results())
    race_page.picture(results(), PICTURE)
    if into is None:
        print(tables)
    else:
        said = into.read_text().partition(MARK)[0]
        into.write_text(f"{said}{MARK}\n\n{tables}\n")


VERBS: dict[str, Callable[[str], None]] = {
    "tune": tune,
    "steps": steps,
    "profile": profile,
    "train": train,
    "judge": judge,
    "speed": speed,
    "curve": curve,
}


def end(number: int, frame: FrameType | None) -> None:
    """As an interrupt does: servers are stopped on the way out, with the engines that they started."""
    sys.exit(128 + number)


def main() -> int:
    signal.signal(signal.SIGTERM, end)
    parser = argparse.ArgumentParser(description="This project's trainer beside that of speculators.")
    parser.add_argument("part", nargs="?", choices=("all", "data", *VERBS, "page"), default="all")
    parser.add_argument("--algorithm", choices=ALGORITHMS, action="append")
    parser.add_argument("--into", type=Path, metavar="PAGE", help="write the tables into this page, below its mark")
    arguments = parser.parse_args()
    WORK.mkdir(exist_ok=True)
    data()
    for name, part in VERBS.items():
        if arguments.part in ("all", name):
            for algorithm in arguments.algorithm or ALGORITHMS:
                part(algorithm)
    if arguments.part in ("all", "page"):
        page(arguments.into)
    return 0


if __name__ == "__main__":
    sys.exit(main())
