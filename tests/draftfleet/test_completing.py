"""Completion in a real bash: what Tab offers."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from draftfleet import live
from draftfleet.live import WorkerReport
from draftfleet.queue import connect
from draftfleet.runs import Run
from draftfleet.settings import Settings, environment
from draftfleet.storage import FileStorage

ASK = """
eval "$(draftfleet --show-completion bash)"
tab() {
    COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
    _draftfleet_completion draftfleet
    echo "${COMPREPLY[*]}"
}
tab draftfleet sta
tab draftfleet pause qw
tab draftfleet status --run ki
tab draftfleet train --run qwen3 --drafter e
tab draftfleet drain no
tab draftfleet produce preset : gs
tab draftfleet --config nowhere.toml pause q
"""


@pytest.fixture
def command(tmp_path: Path) -> Path:
    """A folder with `draftfleet` in it, for PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    program = folder / "draftfleet"
    program.write_text(f"#!{sys.executable}\nfrom draftfleet.cli import main\nmain()\n")
    program.chmod(0o755)
    return folder


def test_bash_completes_verbs_runs_drafters_nodes_and_presets(
    settings: Settings, storage: FileStorage, command: Path
) -> None:
    if shutil.which("bash") is None:
        pytest.skip("wants bash")
    for name in ("qwen3", "qwen3-thinking", "kimi"):
        Run.create(storage, name, {"target.model": "tiny"}, {})
    storage.put("qwen3/drafters/eagle3/drafter-settings.json", b"{}")
    report = WorkerReport(process="node-7-ab", host="node", pid=7, started_at=0, state="working")
    client = connect(settings)
    live.publish(client, report)
    client.persist("draftfleet:live:node-7-ab")
    env = environment(settings)

    said = subprocess.run(
        ["bash", "-c", ASK],
        env=env | {"PATH": f"{command}:{env['PATH']}"},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )

    lines = [sorted(line.split()) for line in said.stdout.splitlines()]
    assert lines == [
        ["status"],
        ["qwen3", "qwen3-thinking"],
        ["kimi"],
        ["eagle3"],
        ["node", "node-7-ab"],
        ["gsm8k"],
        [],
    ]
    assert said.stderr == ""
