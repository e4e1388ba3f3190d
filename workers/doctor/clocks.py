"""Clocks: this node's against those of the storage and of Redis."""

from __future__ import annotations

from draftfleet.settings import Claims
from workers.doctor.findings import Finding, fault, ok, warning

FAR_S = 5.0
FIX = "`timedatectl set-ntp true` on both, or start chrony"


def compared(other: str, skew_s: float, claims: Claims) -> Finding:
    """`skew_s` is how far the other clock is ahead of this node's."""
    found = f"the clock of {other} is {abs(skew_s):.1f} s {'ahead of' if skew_s > 0 else 'behind'} this node's"
    if abs(skew_s) > claims.ttl_s / 2:
        found += f": more than half of claims.ttl_s = {claims.ttl_s:g}"
        return fault("clock", found, FIX, skew_s=skew_s)
    if abs(skew_s) > FAR_S:
        return warning("clock", found, FIX, skew_s=skew_s)
    return ok("clock", f"the clock of {other} is that of this node, give or take {abs(skew_s):.2f} s", skew_s=skew_s)
