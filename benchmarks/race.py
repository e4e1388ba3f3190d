"""This project's trainer beside that of speculators 0.9.0, step by step on the same rows, judged by real vLLM.

    make referee                      makes .venv-referee with vLLM, and .venv-speculators
    python benchmarks/race.py         all of it, three hours on two quiet cores; what race-run/ holds is not done again
    python benchmarks/race.py steps   one part

    data     177,000 tokens of the tiny target's greedy answers, with its states, for both to read
    steps    the two trainers take turns, five steps each: CPU and wall seconds of a step, highest memory
    profile  where the time of a step goes
    train    three seeds of each, to the same number of tokens, taking turns as well; folders that vLLM serves
    judge    vLLM serves each of them: what it accepts on prompts that neither saw
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
MUON = {
    "trainer.optimizer": "muon",
    "trainer.lr": 0.005,
    "trainer.schedule": "linear",
    "trainer.warmup": 0.01,
    "trainer.clip": 1.0,
}
NORMS = {"eagle3.norm_output": True, "eagle3.norm_before_fc": True}
RECIPES: dict[str, dict[str, dict[str, Any]]] = {
    "draftfleet": {
        "eagle3": MUON | {"trainer.step_decay": 1.0, "eagle3.head": "frozen"} | NORMS,
        "dflash": MUON,
    },
    # Its defaults, but for the rate of its Muon: 4e-3 is better than 1e-2 for EAGLE-3; for DFlash 5e-3 is as ours.
    "speculators": {"eagle3": {"muon_lr": 0.004}, "dflash": {"muon_lr": 0.005}},
}
"""How they were found, and what was not tried: benchmarks/results/race_2-core-cpu_2026-11-30.md."""

TURN = 5
"""Steps before the other's turn."""

CURVE = 8
"""Folders of one training, evenly over it, for acceptance against tokens. Of seed 0."""

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
        chosen = {"draftfleet": {"trainer.optimizer": name}, "speculators": {"optimizer": name}}
        recipes = {side: RECIPES[side][algorithm] | chosen[side] for side in SIDES}
        turns = _in_turns(algorithm, recipes, num_steps=102, before=2)
        keep(part="steps", algorithm=algorithm, optimizer=name, **turns)


def profile(algorithm: str) -> None:
    for side in SIDES:
        if not found(part="profile", algorithm=algorithm, side=side):
            order = Order(algorithm, str(TARGET), str(WORK), 0, 100, recipe=RECIPES[side][algorithm])
            child = Child(side, order)
            child.ask(steps=3)
            keep(part="profile", algorithm=algorithm, side=side, ms=child.ask(profile=10))
            child.close()


def train(algorithm: str) -> None:
    for seed in SEEDS:
        num_steps = steps_for(BUDGET[algorithm], seed)
        marks = [num_steps * n // CURVE for n in range(1, CURVE + 1)] if seed == 0 else [num_steps]
        for side in SIDES:
            wanted = {"algorithm": algorithm, "side": side, "seed": seed}
            if found(part="train", **wanted):
                continue
            recipe = RECIPES[side][algorithm]
            child = Child(side, Order(algorithm, str(TARGET), str(WORK), seed, num_steps, recipe=recipe))
            tokens, cpu_s, at, done = 0, 0.0, list[int](), 0
            for mark in marks:
                said = child.ask(steps=mark - done)
                tokens, cpu_s, done = tokens + said["tokens"], cpu_s + said["cpu_s"], mark
                at.append(tokens)
                folder = saved(algorithm, side, seed, mark)
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir(parents=True)
                child.ask(save=str(folder))
            peak = child.ask(memory=True)["peak_bytes"]
            child.close()
            keep(
                part="train", **wanted, recipe=recipe, tokens=tokens, cpu_s=cpu_s, peak_bytes=peak,
                marks=marks, tokens_at=at,
            )  # fmt: skip


def judge(algorithm: str) -> None:
    """Each trained drafter in vLLM."""
    prompts = json.loads((WORK / "judged.json").read_text())
    for trained in found(part="train", algorithm=algorithm):
        wanted = {name: trained[name] for name in ("algorithm", "side", "seed")}
        if found(part="judge", **wanted):
            continue
        folder = saved(**wanted, step=trained["marks"][-1]) / "served"
        with race_vllm.server(TARGET, WORK / "vllm.log", folder, algorithm, K[algorithm]) as server:
            served = race_vllm.ask(server, prompts, max_tokens=MAX_TOKENS, concurrency=8)
        keep(part="judge", **wanted, trained_tokens=trained["tokens"], **race_vllm.row_of(served))


def curve(algorithm: str) -> None:
    """The drafters on the way of seed 0, in our own loop: a dozen starts of vLLM less, and the same to 0.04."""
    prompts = json.loads((WORK / "judged.json").read_text())
    for trained in found(part="train", algorithm=algorithm, seed=0):
        for mark, tokens in list(zip(trained["marks"], trained["tokens_at"], strict=True))[1::2]:
            wanted = {"algorithm": algorithm, "side": trained["side"], "step": mark}
            if not found(part="curve", **wanted):
                folder = saved(algorithm, trained["side"], 0, mark) / "served"
                length = race_own_loop.acceptance(folder, str(TARGET), prompts, K[algorithm], MAX_TOKENS)
                keep(part="curve", **wanted, trained_tokens=tokens, acceptance=length)


def speed(algorithm: str) -> None:
    """All three servers are up and take turns, so that a busy minute of the machine is no server's own."""
    prompts = json.loads((WORK / "judged.json").read_text())
    trained = found(part="train", algorithm=algorithm, seed=0)
    if len(trained) < len(SIDES) or found(part="speed", algorithm=algorithm):
        return
    last = trained[0]["marks"][-1]
    with ExitStack() as stack:
        servers = {"alone": stack.enter_context(race_vllm.server(TARGET, WORK / "vllm-alone.log"))}
        for side in SIDES:
            folder = saved(algorithm, side, 0, last) / "served"
            one = race_vllm.server(TARGET, WORK / f"vllm-{side}.log", folder, algorithm, K[algorithm])
            servers[side] = stack.enter_context(one)
        for server in servers.values():
            race_vllm.ask(server, prompts[:4], max_tokens=32, concurrency=4)
        rates: dict[str, dict[str, dict[str, list[float]]]] = {
            who: {str(n): {"wall": [], "cpu": []} for n in CONCURRENCY} for who in servers
        }
        for _ in range(REPEATS):
            for concurrency in CONCURRENCY:
                for who, server in servers.items():
                    served = race_vllm.ask(server, prompts, max_tokens=MAX_TOKENS, concurrency=concurrency)
                    rates[who][str(concurrency)]["wall"].append(served.tokens / served.seconds)
                    rates[who][str(concurrency)]["cpu"].append(served.tokens / served.cpu_s)
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


def saved(algorithm: str, side: str, seed: int, step: int) -> Path:
    return WORK / "drafters" / f"{algorithm}-{side}-{seed}-{step:05}"


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
