"""The whole path on one machine: `make demo`, or `python examples/demo.py`.

    examples/prompts -> draftfleet produce -> Redis -> draftfleet work <-> transformers serve, with the tiny target
    -> sample shards -> draftfleet trainer -> drafter -> draftfleet evaluate -> draftfleet export

It starts what a machine lacks (Redis, an inference server, Flower) and does what the commands of the same names do,
with the settings of demo.toml. All it makes lies in one folder; run again, it goes on from what is there. The last line
on standard output is the result as JSON, all else goes to standard error.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from following import Pace, follow
from inference_server import InferenceServer
from interrupts import CODE, Interrupts
from outcome import Drafter, found, is_finished, result, summary
from rich.console import Console

from draftfleet.accounting import Accountant
from draftfleet.embedded import Embedded
from draftfleet.errors import DraftfleetError, RunMissing
from draftfleet.queue import TRAIN_QUEUE, connect
from draftfleet.runs import Run
from draftfleet.settings import Settings, assignment, load
from draftfleet.storage import open_storage
from draftfleet.up.stack import Stack
from producer.produce import produce
from trainer.tasks import enqueue

ROOT = Path(__file__).parents[1]
SETTINGS = ROOT / "examples" / "demo.toml"
WORKSPACE = ROOT / "demo-run"

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "OMP_NUM_THREADS": "1",  # on two shared cores a second thread waits for the first more than it computes
    "TOKENIZERS_PARALLELISM": "false",
}
"""Of this process, before it loads what reads them, and so of its children."""

console = Console(stderr=True, highlight=False, soft_wrap=True)
interrupts = Interrupts()


def main() -> int:
    parser = argparse.ArgumentParser(description="From prompts to a drafter on this machine.")
    parser.add_argument("--workspace", type=Path, default=WORKSPACE, metavar="FOLDER", help="default: demo-run")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="any knob; repeatable")
    options = parser.parse_args()
    interrupts.install()
    for variable, value in ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    workspace: Path = options.workspace.absolute()
    again = "make demo" if workspace == WORKSPACE else f"python examples/demo.py --workspace {workspace}"
    os.chdir(ROOT)  # the target is named by its path from here, and the server knows it under this name
    (workspace / "logs").mkdir(parents=True, exist_ok=True)
    logging.basicConfig(filename=workspace / "logs" / "demo.log", level=logging.INFO)
    try:
        line = json.dumps(demo(workspace, dict(map(assignment, options.set))))
    except KeyboardInterrupt:
        console.print(f"\nStopped, nothing runs any more. `{again}` goes on from here.", markup=False)
        return CODE
    except DraftfleetError as error:
        console.print(f"\ndemo: {error}", markup=False)
        console.print(f"Logs are in {workspace / 'logs'}. `{again}` goes on from here.", markup=False)
        return error.exit_code
    print(line)
    return 0


def demo(workspace: Path, flags: dict[str, Any]) -> dict[str, Any]:
    """From prompts to a judged drafter; what an earlier start has done is not done again."""
    flags = {"storage.url": f"file://{workspace / 'data'}", "queue.embedded_dir": str(workspace / "redis"), **flags}
    settings = load(SETTINGS, flags)
    name, pace, began_at = settings.trainer.drafter, Pace(), time.monotonic()
    tell_found(settings, workspace)
    with ExitStack() as running:
        flags["queue.url"] = running.enter_context(Embedded(settings.queue.embedded_dir)).url
        settings = load(SETTINGS, flags)
        step("draftfleet produce")
        with interrupts.during_bars():
            made = produce(settings, progress=console.is_terminal)
        console.print(
            f"  {made.prompts:,} prompts ({made.new:,} new): {made.train:,} to train on, {made.heldout:,} held out, of "
            f"which {made.overlap} stand among the others too; {made.duplicates} duplicates, {made.malformed} malformed"
        )
        run = Run.open(open_storage(settings.storage), settings.run)
        is_answered = Accountant(run).account().is_complete
        if not Drafter.of(run, name).is_trained:
            step("draftfleet train")
            ask_for_training(settings)
        if not is_answered or not Drafter.of(run, name).is_trained:
            pace = answer_and_train(running, flags, run, workspace / "logs", needs_server=not is_answered)

    from trainer.evaluate import evaluate  # noqa: PLC0415  brings torch, which only the end of the way needs
    from trainer.export import export  # noqa: PLC0415

    drafter = Drafter.of(run, name)
    if not drafter.evaluation:
        step("draftfleet evaluate")
        if not console.is_terminal:
            console.print(
                f"  up to {settings.evaluation.prompts} held-out prompts; its log is {workspace}/logs/demo.log"
            )
        with interrupts.during_bars():
            evaluate(settings, progress=console.is_terminal)
    if not drafter.exports:
        step("draftfleet export")
        export(settings, [])
    account = Accountant(run).account()
    minutes, seconds = divmod(round(time.monotonic() - began_at), 60)
    step("done", f"in {minutes} min {seconds} s")
    for line in summary(settings, account, drafter, pace):
        console.print(f"  {line}", markup=False)
    return result(account, drafter)


def answer_and_train(running: ExitStack, flags: dict[str, Any], run: Run, logs: Path, *, needs_server: bool) -> Pace:
    """Run a worker and a trainer, and the inference server if a prompt waits for it, until both are through."""
    server = None
    if needs_server:
        server = running.enter_context(InferenceServer(load(SETTINGS, flags).model, logs / "transformers.log"))
        step("transformers serve", server.url)
        flags = flags | {"worker.servers": [server.url]}
    stack = running.enter_context(Stack(load(SETTINGS, flags), logs))
    step("draftfleet up", f"Flower {stack.flower_url} login {stack.flower_login}")
    with interrupts.during_bars():
        return follow(stack.settings, run, stack, server, console)


def ask_for_training(settings: Settings) -> None:
    """Asking twice is harmless, but the second answer would be waited for."""
    if connect(settings).llen(TRAIN_QUEUE):
        console.print("  it is in the queue already")
    else:
        console.print(f"  {enqueue(settings)}", markup=False)


def step(command: str, words: str = "") -> None:
    console.print(f"\n[bold]{command}[/bold]  {words}")


def tell_found(settings: Settings, workspace: Path) -> None:
    console.print(f"[bold]draftfleet demo[/bold]: from prompts to a drafter, in {workspace}")
    try:
        run = Run.open(open_storage(settings.storage), settings.run)
    except RunMissing:
        return
    drafter = Drafter.of(run, settings.trainer.drafter)
    begun = "is finished" if is_finished(run, drafter) else "was begun before and goes on"
    console.print(f"This run {begun}: {', '.join(found(run, drafter))}.")


if __name__ == "__main__":
    sys.exit(main())
