"""The pictures of `draftfleet status` in docs/status.md, drawn from a run that is at work on this machine.

    python docs/pictures/status.py

Three fake servers of unequal speed, of which two refuse some rows and one dies; a worker; a drafter whose progress.json
is put by hand, since a training takes its time. Half a minute.
"""

from __future__ import annotations

import io
import json
import re
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.terminal_theme import DEFAULT_TERMINAL_THEME, MONOKAI, TerminalTheme

from draftfleet.accounting import Accountant
from draftfleet.claims import Claims
from draftfleet.embedded import Embedded
from draftfleet.queue import connect
from draftfleet.records import Prompt, prompt_id
from draftfleet.runs import Run
from draftfleet.settings import Settings, load
from draftfleet.status import collect, render
from draftfleet.storage import FileStorage
from draftfleet.testing import FakeProcess
from draftfleet.testing.workers import WorkerProcess, enqueue

PLACE = Path(__file__).parent
WIDTHS = {"wide": 132, "narrow": 60}
THEMES = {"light": DEFAULT_TERMINAL_THEME, "dark": MONOKAI}
NUM_ROWS = 1200


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        state = at_work(Path(folder))
    for width, columns in WIDTHS.items():
        for name, theme in THEMES.items():
            draw(state, columns, theme, PLACE / f"status-{width}-{name}.svg")
    print(f"wrote {len(WIDTHS) * len(THEMES)} pictures to {PLACE}")


def draw(state: dict[str, Any], columns: int, theme: TerminalTheme, file: Path) -> None:
    console = Console(record=True, width=columns, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(render(state))
    drawn = console.export_svg(title="draftfleet status", theme=theme)
    file.write_text(re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.DOTALL))  # the page's reader may be offline


def at_work(folder: Path) -> dict[str, Any]:
    """The state of a run of which two fifths are done, soon after a server has died."""
    lengths: dict[str, Any] = {"tokens": 600, "spread": 0.8, "most_tokens": 4096}
    knobs: dict[str, Any] = {
        "model": "qwen3",
        "slots": 16,
        "seconds_per_token": 0.01,
        "half_speed_at": 32,
        "time_scale": 8,
        **lengths,
    }
    with (
        Embedded(folder / "redis") as redis_server,
        FakeProcess(**knobs) as fast,
        FakeProcess(**knobs | dict[str, Any](speed=0.5)) as slow,
        FakeProcess(**knobs) as mortal,
    ):
        for server in (fast, slow):
            server.fault("status", status=400, share=0.02)
        settings = load(
            flags={
                "queue.url": redis_server.url,
                "storage.url": f"file://{folder / 'storage'}",
                "run": "qwen3",
                "target.model": "qwen3",
                "worker.servers": [fast.url, slow.url, mortal.url],
                "worker.concurrency": 16,
            }
        )
        run = Run.create(FileStorage(folder / "storage"), "qwen3", {"target.model": "qwen3"}, {})
        enqueue(settings, run, _prompts(), batch_size=32)
        _train_by_hand(run)
        trainer = Claims(connect(settings), run.run_id, settings.claims, "trainer-2107@gpu1")
        with WorkerProcess(settings, folder / "worker.log"):
            accountant = Accountant(run)
            _until(lambda: _is_past(0.25, settings, accountant))
            mortal.fault("die")
            trainer.take("train:eagle3")
            return _until(lambda: _is_past(0.4, settings, accountant))


def _prompts() -> list[Prompt]:
    asked = [[{"role": "user", "content": f"Question {number}?"}] for number in range(NUM_ROWS)]
    return [Prompt(prompt_id(messages, None), "train", messages) for messages in asked]


def _train_by_hand(run: Run) -> None:
    folder = run.drafter_dir("eagle3")
    folder.mkdir(parents=True)
    (folder / "drafter-settings.json").write_text('{"trainer": {"max_steps": 20000, "algorithm": "eagle3"}}')
    progress = {
        "step": 4210, "max_steps": 20_000, "loss": 3.127, "tokens": 41_250_816, "tokens_per_s": 18_400.0,
        "rows_admitted": 431, "finished": False, "acceptance_length": 2.31, "acceptance_step": 4000,
    }  # fmt: skip
    (folder / "progress.json").write_text(json.dumps(progress))


def _is_past(share: float, settings: Settings, accountant: Accountant) -> dict[str, Any] | None:
    state = collect(settings, accountant)
    print(f"\r{state['ok']:,} of {NUM_ROWS:,} rows", end="", flush=True)
    return state if state["ok"] >= share * NUM_ROWS else None


def _until(condition: Callable[[], Any]) -> Any:
    end = time.monotonic() + 300
    while time.monotonic() < end:
        if found := condition():
            print()
            return found
        time.sleep(1)
    raise SystemExit("it took more than five minutes")


if __name__ == "__main__":
    main()
