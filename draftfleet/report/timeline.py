"""When servers were away and nodes started, drained or failed: lanes over time, and the events in words."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from draftfleet.history import History, Noted, host_of
from draftfleet.report import words
from draftfleet.report.charts import Label, time_ticks
from draftfleet.report.spread import Times

MOST_EVENTS = 400
MOST_LANES = 40
MOST_SPANS = 400
"""Of one lane."""

STATES = {"server ready": "ready", "server rests": "resting", "server left out": "mismatched"}
ENDS = ("worker drained", "worker stops")
MARKS = {
    "worker started": "start", "worker draining": "drain", "worker drained": "end", "worker stops": "fault",
    "worker paused": "fault", "redis out of reach": "fault", "batch split": "fault", "row given up": "fault",
    "server stalled": "fault", "claim lapsed": "fault", "celery ended by itself": "fault",
}  # fmt: skip
"""What is marked in a lane; everything is in the list."""

CONCURRENCY = "concurrency changed"


@dataclass(frozen=True, slots=True)
class Span:
    """From `start`, `width` wide, in percent. `state` is ready, waiting, away, resting or mismatched."""

    start: float
    width: float
    state: str
    text: str


@dataclass(frozen=True, slots=True)
class Mark:
    at: float
    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class Lane:
    name: str
    spans: list[Span]
    marks: list[Mark]


@dataclass(frozen=True, slots=True)
class Told:
    """An event as a line of a table."""

    at: str
    where: str
    event: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """`counts` are events by kind. `left_out` events are not in the lists, which have the latest of each."""

    is_known: bool
    damaged: int
    lanes: list[Lane]
    num_lanes: int
    ticks: list[Label]
    counts: list[tuple[str, int]]
    events: list[Told]
    decisions: list[Told]
    left_out: int


def timeline_of(history: History, times: Times | None, as_of: float) -> Timeline:
    """`times` are those of the rows; events before and after widen them."""
    faults = [one for one in history.events if one.event != CONCURRENCY]
    decisions = [one for one in history.events if one.event == CONCURRENCY]
    moments = [one.at for one in history.events] + ([times.start, times.end] if times else [])
    span = Times(min(moments), min(max(moments), as_of)) if moments else None
    lanes = _lanes(history, span) if span else []
    return Timeline(
        is_known=history.is_there,
        damaged=history.damaged,
        lanes=lanes[:MOST_LANES],
        num_lanes=len(lanes),
        ticks=time_ticks(span) if span else [],
        counts=Counter(one.event for one in history.events).most_common(),
        events=[_told(one) for one in faults[-MOST_EVENTS:]],
        decisions=[_told(one) for one in decisions[-MOST_EVENTS:]],
        left_out=max(0, len(faults) - MOST_EVENTS) + max(0, len(decisions) - MOST_EVENTS),
    )


def _lanes(history: History, span: Times) -> list[Lane]:
    """A lane for each node, and one for each of its servers, whichever process had it."""
    by_host = defaultdict[str, list[Noted]](list)
    for one in history.events:
        by_host[host_of(one.process)].append(one)
    lanes: list[Lane] = []
    for host, events in sorted(by_host.items()):
        lanes.append(Lane(host, [], _marks([one for one in events if not one.fields.get("server")], span)))
        ends = {one.process: one.at for one in events if one.event in ENDS}
        servers = defaultdict[str, list[Noted]](list)
        for one in events:
            if one.fields.get("server"):
                servers[str(one.fields["server"])].append(one)
        for server, its in servers.items():
            name = server.partition("://")[2] or server
            lanes.append(Lane(name, _spans(its, ends, span)[-MOST_SPANS:], _marks(its, span)))
    return lanes


def _marks(events: Iterable[Noted], span: Times) -> list[Mark]:
    found = [
        Mark(round(100 * span.part(one.at), 2), MARKS[one.event], f"{words.moment(one.at)} {one.event} {_fields(one)}")
        for one in events
        if one.event in MARKS
    ]
    return found[-MOST_SPANS:]


def _spans(events: Sequence[Noted], ends: Mapping[str, float], span: Times) -> list[Span]:
    """What state a server was in, from the moment at which that was said until another was, or its worker ended.

    A worker that was killed said nothing: its last word holds until another worker speaks of the server.
    """
    said = [(one, state) for one in events if (state := _state(one)) is not None]
    found: list[Span] = []
    for number, (one, state) in enumerate(said):
        if not state or (
            found and number and said[number - 1][1] == state and said[number - 1][0].process == one.process
        ):
            continue
        following = (after.at for after, now in said[number + 1 :] if now != state or after.process != one.process)
        until = min(next(following, span.end), ends.get(one.process, span.end))
        start, end = 100 * span.part(one.at), 100 * span.part(until)
        text = f"{state} from {words.moment(one.at)} for {words.duration(max(until - one.at, 0))}"
        found.append(Span(round(start, 2), round(max(end - start, 0.15), 2), state, text))
    return found


def _state(one: Noted) -> str | None:
    """Empty where the server is no longer known, None where nothing is said of its state."""
    if one.event == "waiting for server":
        return str(one.fields.get("state") or "away")
    return "" if one.event == "server removed" else STATES.get(one.event)


def _told(one: Noted) -> Told:
    where = str(one.fields.get("server") or host_of(one.process))
    return Told(words.moment(one.at), where.partition("://")[2] or where, one.event, _fields(one))


def _fields(one: Noted) -> str:
    if one.event == CONCURRENCY:
        return f"{one.fields.get('was')} → {one.fields.get('limit')}: {one.fields.get('because')}"
    said = {name: value for name, value in one.fields.items() if name not in ("server", "process", "model")}
    return words.clipped(", ".join(f"{name} {_value(value)}" for name, value in said.items()), 240)


def _value(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
