"""Limits of time against the speed that the canary measured."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence

from workers.canary import HEADROOM
from workers.doctor.case import Asked, Case
from workers.doctor.findings import Finding, fault, ok, skipped, warning


def look(case: Case) -> Iterator[Finding]:
    measured = [one for one in case.asked if one.completion is not None and one.completion.completion_tokens > 0]
    if measured:
        yield from (_requests(case, url, paces) for url, paces in _paces(measured).items())
    else:
        yield skipped("request_timeout_s", "no answer was measured")
    yield _drain(case, measured)


def _paces(measured: Sequence[Asked]) -> dict[str, list[float]]:
    """Seconds per token of each answer, by server."""
    found: dict[str, list[float]] = {}
    for asked in measured:
        assert asked.completion is not None
        found.setdefault(asked.server, []).append(asked.seconds / asked.completion.completion_tokens)
    return found


def _requests(case: Case, server: str, paces: Sequence[float]) -> Finding:
    """The fastest pace decides what is impossible, the usual one what is near."""
    timeout_s, wanted = case.settings.worker.request_timeout_s, case.max_tokens
    least_s, usual_s = min(paces) * wanted, statistics.median(paces) * wanted
    counted = f"{wanted} tokens at {min(paces):.3g} s each take {least_s:.3g} s at {server}"
    values = {"server": server, "timeout_s": timeout_s, "least_s": least_s, "usual_s": usual_s}
    fix = f"`--set worker.request_timeout_s={math.ceil(usual_s * HEADROOM)}`, or leave it out"
    if timeout_s < least_s:
        found = f"worker.request_timeout_s = {timeout_s:g} would cut every long answer: {counted}"
        return fault("request_timeout_s", found, fix, **values)
    if timeout_s < usual_s * HEADROOM:
        found = f"worker.request_timeout_s = {timeout_s:g} is near: {counted}, and more under load"
        return warning("request_timeout_s", found, fix, **values)
    return ok("request_timeout_s", f"{timeout_s:g} s: {counted}", **values)


def _drain(case: Case, measured: Sequence[Asked]) -> Finding:
    knobs = case.settings.worker
    supervisor_s = knobs.drain_s + 60
    told = f"a supervisor waits {supervisor_s:g} s before it kills (systemd TimeoutStopSec, stop_grace_period)"
    seconds = sorted(one.seconds for one in measured)
    usual_s = statistics.median(seconds) if seconds else 0.0
    values = {"drain_s": knobs.drain_s, "supervisor_s": supervisor_s, "usual_s": usual_s}
    if usual_s > knobs.drain_s:
        return warning(
            "drain_s",
            f"worker.drain_s = {knobs.drain_s:g}, and half of the canary's answers took over {usual_s:.0f} s: a stop "
            "throws away the tokens of most requests in flight",
            f"`--set worker.drain_s={math.ceil(usual_s * 2)}`, and {math.ceil(usual_s * 2) + 60} s for the supervisor",
            **values,
        )
    return ok("drain_s", f"{knobs.drain_s:g} s; {told}", **values)
