"""The page on `draftfleet bench`: its example runs as it is written, and says what the page says."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

from draftfleet.ports import free_port
from draftfleet.testing import FakeServer

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/bench.md").read_text()
BLOCK = next(block for block in re.findall(r"^```bash\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE) if "fake" in block)
SHOWN = re.findall(r"^(?:acceptance length|equal answers:) .*$", PAGE, re.MULTILINE)


def test_the_example_says_what_the_page_says(tmp_path: Path) -> None:
    *servers, bench = [shlex.split(line) for line in BLOCK.replace("\\\n", " ").splitlines()]
    with ExitStack() as stack:
        ports = {words[words.index("--port") + 1]: str(free_port()) for words in servers}
        for words in servers:
            flags = dict(zip(words[2::2], words[3::2], strict=True))
            settings = dict(
                one.split("=") for flag, one in zip(words[2::2], words[3::2], strict=True) if flag == "--set"
            )
            stack.enter_context(
                FakeServer(
                    port=int(ports[flags["--port"]]),
                    model=flags["--model"],
                    seconds_per_token=float(flags["--seconds-per-token"]),
                    **settings,
                )
            )
        for port, free in ports.items():
            bench = [word.replace(f":{port}", f":{free}") for word in bench]
        bench = [str(ROOT / word) if word.startswith("examples/") else word for word in bench]
        result = subprocess.run(
            [sys.executable, "-m", *bench], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
        )

    assert result.returncode == 0, result.stderr
    assert len(SHOWN) == 2
    assert [line for line in result.stdout.splitlines() if line.startswith(("acceptance", "equal"))] == SHOWN
    assert "warning" not in result.stdout
