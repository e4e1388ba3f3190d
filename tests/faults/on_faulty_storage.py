"""Run the command on a storage that fails: `on_faulty_storage.py FOLDER STORAGE python -m draftfleet ...`.

Python tells an audit hook of each `open`, `os.link` and `os.rename` before it is done. While FOLDER has a file of that
name, it fails with ENOSPC for files that are written under STORAGE, as it would on a full disk.
"""

import errno
import os
import runpy
import sys

CALLS = ("open", "os.link", "os.rename")
FOLDER, STORAGE = sys.argv[1:3]


def hook(call: str, args: tuple[object, ...]) -> None:
    if call in CALLS and os.path.exists(f"{FOLDER}/{call}") and is_written(call, args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def is_written(call: str, args: tuple[object, ...]) -> bool:
    """Storage files are staged under hidden names, in a folder that is open, or named by their full path."""
    name = str(args[0])
    flags = args[2] if call == "open" and isinstance(args[2], int) else os.O_CREAT
    return bool(flags & os.O_CREAT) and (name.startswith(".") or name.startswith(STORAGE))


sys.argv = sys.argv[5:]
sys.addaudithook(hook)
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
