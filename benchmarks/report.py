"""The report of a large run: seconds and memory to write it, its size, and when a browser shows it.

    python benchmarks/report.py --rows 100000

Makes a run of conversations of one turn (prompts and answers of words, ids of the tiny target) over eight servers of
two nodes, with a record of its workers; then `draftfleet report` as a process of its own, and the file in Chromium,
cold: until its script has filled the list of samples, and until a search over them is answered.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from playwright.sync_api import sync_playwright

from draftfleet import history
from draftfleet.embedded import Embedded
from draftfleet.history import Noted
from draftfleet.names import batch_id
from draftfleet.records import Prompt, Sample, prompt_id
from draftfleet.runs import Run
from draftfleet.settings import environment, load
from draftfleet.storage import FileStorage

ROOT = Path(__file__).parents[1]
BATCH, SPEED, IN_FLIGHT, BEGUN = 64, 60.0, 32, 1_796_000_000.0
SERVERS = [("node-a", 8000 + at) for at in range(4)] + [("node-b", 8000 + at) for at in range(4)]
TEXT = "the a of to and river engine garden number history language light winter market answer question method"
WORDS = TEXT.split()
SOURCES = ("chat", "code", "math")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--tokens", type=int, default=600, help="of an answer, on average")
    knobs = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, Embedded(Path(name) / "redis") as redis_server:
        folder = Path(name)
        run = Run.create(
            FileStorage(folder / "storage"), "large", {"target.model": "t", "sampling.max_tokens": 4096}, {}
        )
        numbers = range(-(-knobs.rows // BATCH))
        cores = os.cpu_count() or 1
        with ProcessPoolExecutor(cores) as pool:
            parts = [(str(folder / "storage"), numbers[core::cores], knobs.rows, knobs.tokens) for core in range(cores)]
            list(pool.map(_fill, parts))
        run.seal({"prompts": knobs.rows})
        for host in ("node-a", "node-b"):
            history.put(run, f"{host}-1-aaaaaa", 0, list(_noted(host)))
        flags = {"queue.url": redis_server.url, "storage.url": str(folder / "storage"), "run": "large"}
        figures = {"rows": knobs.rows, "load_before": round(os.getloadavg()[0], 1)}
        figures |= _written(environment(load(flags=flags)), folder / "large.html")
        figures |= _shown(folder / "large.html") | {"load_after": round(os.getloadavg()[0], 1)}
    print(json.dumps(figures))


def _fill(part: tuple[str, range, int, int]) -> None:
    folder, numbers, rows, tokens = part
    storage = FileStorage(folder)
    run = Run.open(storage, "large")
    for number in numbers:
        name = batch_id("train", number)
        pairs = [_row(run, name, row, tokens) for row in range(number * BATCH, min(rows, (number + 1) * BATCH))]
        run.write_prompts(name, [prompt for prompt, _ in pairs])
        run.commit(name, [sample for _, sample in pairs])
    run.index.flush()


def _row(run: Run, batch: str, number: int, mean: int) -> tuple[Prompt, Sample]:
    """Answers of one server follow each other, so many at once."""
    dice = random.Random(number)
    host, port = SERVERS[number % len(SERVERS)]
    messages = [{"role": "user", "content": f"{' '.join(dice.choices(WORDS, k=dice.randint(10, 80)))} {number}?"}]
    prompt = Prompt(prompt_id(messages, None), "train", messages, source=dice.choice(SOURCES))
    tokens = max(1, min(4096, int(dice.lognormvariate(0, 0.8) * mean)))
    thinks = dice.random() < 0.5
    words = " ".join(dice.choices(WORDS, k=tokens // 2))
    sample = Sample(
        run_id=run.run_id, run=run.name, batch=batch, row_key=prompt.row_key, prompt_id=prompt.prompt_id, split="train",
        messages=messages, outcome="truncated" if tokens == 4096 else "ok", finish_reason="stop",
        reasoning=words if thinks else None, reasoning_source="field" if thinks else None, content=words,
        prompt_token_ids=dice.choices(range(500), k=60), token_ids=dice.choices(range(500), k=tokens),
        ids_source="engine", prompt_tokens=60, completion_tokens=tokens, model="t", server=f"http://127.0.0.1:{port}",
        dialect="vllm", worker=f"{host}-1-aaaaaa", source=prompt.source, seconds=tokens / SPEED,
        started_at=BEGUN + number / len(SERVERS) / IN_FLIGHT * mean * 1.4 / SPEED,
    )  # fmt: skip
    return prompt, sample


def _noted(host: str) -> list[Noted]:
    servers = [f"http://127.0.0.1:{port}" for name, port in SERVERS if name == host]
    changes = [
        Noted(at=BEGUN + 20 * at, event="concurrency changed",
              fields={"server": servers[at % 4], "limit": 32 + at % 9, "was": 32, "because": "it had room for more"})
        for at in range(480)
    ]  # fmt: skip
    return [Noted(at=BEGUN, event="server ready", fields={"server": one, "limit": 32}) for one in servers] + changes


def _written(env: dict[str, str], file: Path) -> dict[str, float]:
    command = [sys.executable, "-m", "draftfleet", "report", "--out", str(file), "--no-progress"]
    command += ["--target", str(ROOT / "examples/tiny-target")]
    started = time.monotonic()
    pid = os.posix_spawn(sys.executable, command, env)
    _, code, usage = os.wait4(pid, 0)
    assert code == 0, code
    return {
        "write_s": round(time.monotonic() - started, 2),
        "write_cpu_s": round(usage.ru_utime + usage.ru_stime, 2),
        "peak_mb": round(usage.ru_maxrss / 1e3),
        "file_mb": round(file.stat().st_size / 1e6, 2),
    }


def _shown(file: Path) -> dict[str, float]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        page = browser.new_page()
        started = time.monotonic()
        page.goto(file.as_uri())
        page.wait_for_selector("#list li")
        interactive_s = time.monotonic() - started
        timing = page.evaluate("performance.getEntriesByType('navigation')[0].domInteractive")
        started = time.monotonic()
        page.fill("#search", "engine garden")
        page.wait_for_function("!document.getElementById('found').textContent.startsWith('0')")
        searched_s = time.monotonic() - started
        heap = page.evaluate("performance.memory.usedJSHeapSize")
        browser.close()
    return {
        "interactive_s": round(interactive_s, 2),
        "dom_interactive_s": round(timing / 1e3, 2),
        "search_s": round(searched_s, 2),
        "browser_heap_mb": round(heap / 1e6, 1),
    }


if __name__ == "__main__":
    main()
