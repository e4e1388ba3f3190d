"""`draftfleet status`: how far a run is, and what keeps it from its end, for a person or as JSON.

collecting.py   the state as plain data: everything that is shown is in it
advice.py       what a person should know of it, and the one thing to do next
panels.py       the state as text and tables
showing.py      printed once, or again and again
"""

from __future__ import annotations

from draftfleet.status.advice import next_step, warnings
from draftfleet.status.collecting import Seen, collect
from draftfleet.status.panels import render
from draftfleet.status.showing import show
from draftfleet.status.training import drafters

__all__ = ["Seen", "collect", "drafters", "next_step", "render", "show", "warnings"]
