"""The contract of draftfleet: what the producer, the workers and the trainer agree on. No role, no torch.

`from draftfleet import Run` is the way in from a script (docs/python.md).
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from draftfleet.api import Run as Run

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    """`Run` on use: the command line's help can do without what it brings."""
    if name == "Run":
        from draftfleet.api import Run  # noqa: PLC0415

        return Run
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
