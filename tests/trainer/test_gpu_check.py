"""The recipe for a GPU, on a machine without one: it says so, and runs reduced where that is asked for."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = str(Path(__file__).parents[2] / "benchmarks/gpu_check.py")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_says_so_in_one_sentence() -> None:
    ended = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, check=False)

    assert ended.returncode == 2
    assert re.fullmatch(r"torch \S+ sees no GPU here: run this on .*\.\n", ended.stdout)


def test_reduced_it_runs_every_check_of_both_algorithms_on_a_cpu() -> None:
    ended = subprocess.run([sys.executable, SCRIPT, "--device", "cpu"], capture_output=True, text=True, check=False)

    assert ended.returncode == 0, ended.stdout + ended.stderr
    lines = re.findall(r"^(.*?) +(eagle3|dflash) +(ok|FAILED) ", ended.stdout, re.MULTILINE)
    checks = [check for check, algorithm, _ in lines if algorithm == "eagle3"]
    page = (Path(SCRIPT).parents[1] / "docs/gpu.md").read_text()
    assert re.findall(r"^\| `([^`.]+)` \| ", page.partition("## `make gpu-check`")[2], re.MULTILINE) == checks
    assert [result for _, _, result in lines] == ["ok"] * 2 * len(checks)
