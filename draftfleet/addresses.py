"""Addresses of servers, and ranges of ports: `http://127.0.0.1:8000-8007` is eight of them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import urlsplit

from draftfleet.errors import SettingsError

MOST_PORTS = 256
_RANGE = re.compile(r"(?P<host>https?://[^/]*):(?P<first>\d+)-(?P<last>\d+)", re.I)


@dataclass(frozen=True, slots=True)
class Address:
    """`is_named`: a server is expected there. At a port of a range there may be one, now or later."""

    url: str
    is_named: bool = True


def expand(servers: Iterable[str], knob: str = "worker.servers") -> list[Address]:
    """Each address once, without slash and /v1 at the end. Raises SettingsError, which names the knob."""
    found: dict[str, Address] = {}
    for written in servers:
        text = written.strip().rstrip("/").removesuffix("/v1").rstrip("/")
        ranged = _RANGE.fullmatch(text)
        urls = _ports(knob, written, ranged) if ranged else [_checked(knob, written, text)]
        for url in urls:
            if ranged is None or url not in found:
                found[url] = Address(url, is_named=ranged is None)
    return list(found.values())


def _ports(knob: str, written: str, ranged: re.Match[str]) -> list[str]:
    host, first, last = ranged["host"], int(ranged["first"]), int(ranged["last"])
    if not 1 <= first <= last <= 65535:
        raise SettingsError(
            f"{knob} has {written!r}: write the smaller port first, and ports from 1 to 65535, "
            "for example http://127.0.0.1:8000-8007."
        )
    if last - first >= MOST_PORTS:
        raise SettingsError(
            f"{knob} has {written!r}, which is {last - first + 1} ports: a range may have {MOST_PORTS}."
        )
    return [_checked(knob, written, f"{host}:{port}") for port in range(first, last + 1)]


def _checked(knob: str, written: str, url: str) -> str:
    try:
        parts = urlsplit(url)
        is_right = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # no port
        is_right = False
    if not is_right:
        raise SettingsError(
            f"{knob} has {written!r}: write addresses as http://HOST:PORT, "
            "or http://HOST:FIRST-LAST for a range of ports."
        )
    return url
