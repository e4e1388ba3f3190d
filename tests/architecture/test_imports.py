"""Importing a module does nothing: no thread, no process, no socket, no file, no word."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

LOOK = """
import importlib, json, logging, pkgutil, sys, threading
import psutil

package = sys.argv[1]
found = [package, *(m.name for m in pkgutil.walk_packages([sys.argv[2]], package + "."))]
for name in found:
    if not name.endswith("__main__"):
        importlib.import_module(name)
me = psutil.Process()
sockets = me.net_connections("all") if hasattr(me, "net_connections") else me.connections("all")
print(json.dumps({
    "modules": len(found),
    "threads": [t.name for t in threading.enumerate() if t is not threading.main_thread()],
    "children": [child.cmdline() for child in me.children()],
    "sockets": len(sockets),
    "log handlers": len(logging.root.handlers),
    "torch": "torch" in sys.modules,
}))
"""


@pytest.mark.parametrize("package", ["draftfleet", "producer", "workers", "trainer"])
def test_importing_a_package_starts_nothing(package: str, tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-c", LOOK, package, str(ROOT / package)],
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    seen = json.loads(result.stdout)
    assert seen.pop("modules") == len(list((ROOT / package).rglob("*.py")))
    assert seen == {
        "threads": [],
        "children": [],
        "sockets": 0,
        "log handlers": 0,
        "torch": package == "trainer",
    }
    assert list(tmp_path.iterdir()) == []


def test_a_training_can_be_asked_for_where_no_torch_is_installed() -> None:
    code = "import sys; sys.modules['torch'] = None; import trainer.tasks"

    subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": str(ROOT)}, timeout=60, check=True)
