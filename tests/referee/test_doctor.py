"""`draftfleet doctor` against real vLLM: nothing is wrong, and that is said in under a minute."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from draftfleet.embedded import Embedded

pytestmark = [pytest.mark.referee, pytest.mark.timeout(1800)]

MINUTE_S = 60


def test_real_vllm_is_well_in_under_a_minute(
    plain_vllm: httpx.Client, target: Path, tmp_path: Path, figure: Callable[[str, object], None]
) -> None:
    data = tmp_path / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"Compute {i} + {97 - i}."}) + "\n" for i in range(64)))
    (tmp_path / "storage").mkdir()
    flags = {
        "--servers": plain_vllm.base_url,
        "--model": "tiny-target",
        "--target": target,
        "--storage": tmp_path / "storage",
        "--max-tokens": 256,
    }
    with Embedded(tmp_path / "valkey") as valkey:
        result = subprocess.run(
            [
                *(sys.executable, "-m", "draftfleet", "doctor", data, "--json"),
                *(str(word) for pair in flags.items() for word in pair),
            ],
            cwd=tmp_path,
            env=os.environ | {"DRAFTFLEET_QUEUE__URL": valkey.url},
            capture_output=True,
            text=True,
            timeout=2 * MINUTE_S,
            check=False,
        )

    report: dict[str, Any] = json.loads(result.stdout)
    figure("doctor on real vLLM, seconds", report["seconds"])
    # The node of the tests may have workers of others.
    wrong = [one for one in report["findings"] if one["level"] in ("fault", "warning") and one["check"] != "this node"]
    assert wrong == []
    assert result.returncode == 0
    assert report["seconds"] < MINUTE_S
    ids = [one for one in report["findings"] if (one["subject"], one["check"]) == ("tokenizer", "ids")]
    assert ids[0]["values"]["by"] == "ids"
    figure("doctor's prompts with the tokenizer's own ids", ids[0]["found"])
    assert {record["ids_match"] for record in report["canary"]} == {True}
    assert {record["reasoning_source"] for record in report["canary"]} == {"reasoning"}
