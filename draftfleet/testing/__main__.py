"""`python -m draftfleet.testing --port 0 --shape vllm --slots 48`: a fake server until it is stopped."""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys

from pydantic import ValidationError

from draftfleet.children import die_with_parent
from draftfleet.testing.behaviour import Behaviour
from draftfleet.testing.running import serving


async def _serve(behaviour: Behaviour, host: str, port: int) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with serving(behaviour, host, port) as url:
        print(json.dumps({"url": url}), flush=True)
        await stop.wait()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m draftfleet.testing", description="A fake inference server.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0: any free port; the address is printed as JSON.")
    parser.add_argument("--parent", type=int, default=None, help="Process id: end when that process, our parent, ends.")
    for name, field in Behaviour.model_fields.items():
        if name != "faults":
            parser.add_argument(f"--{name.replace('_', '-')}", default=None, help=field.description)
    parser.add_argument("behaviour", nargs="?", default="{}", help="All of these, and `faults`, as one JSON object.")
    given = vars(parser.parse_args())
    host, port, parent, settings = (given.pop(name) for name in ("host", "port", "parent", "behaviour"))
    settings = json.loads(settings)
    if parent is not None:
        die_with_parent(parent)
    settings |= {name: value for name, value in given.items() if value is not None}
    try:
        behaviour = Behaviour.model_validate(settings)
    except ValidationError as error:
        print(error, file=sys.stderr)
        return 2
    asyncio.run(_serve(behaviour, host, port))
    return 0


if __name__ == "__main__":
    sys.exit(main())
