"""What the servers did, and when: throughput, requests in flight beside their limits, and what it cost."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median

from draftfleet.history import History, host_of
from draftfleet.report import words
from draftfleet.report.charts import TONES, Chart, Series, over_time, tone
from draftfleet.report.rows import Request, Row, Rows
from draftfleet.report.spread import Spread, Times, covered

MOST_CHARTS = 12
"""Servers with a chart of their own; the table has all."""

Key = tuple[str, str]
"""Host and address: many nodes call their servers by the same local addresses."""


@dataclass(slots=True, kw_only=True)
class Server:
    """`first` and `last` are when its first request began and its last answer came; `busy_s` when it had any."""

    name: str
    requests: int = 0
    rows: dict[str, int] = field(default_factory=dict[str, int])
    tokens: int = 0
    first: float = float("inf")
    last: float = 0.0
    busy_s: float = 0.0
    seconds: list[float] = field(default_factory=list[float])

    @property
    def held_s(self) -> float:
        return max(0.0, self.last - self.first)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.held_s if self.held_s else 0.0

    @property
    def median_s(self) -> float | None:
        return median(self.seconds) if self.seconds else None


@dataclass(slots=True, kw_only=True)
class Work:
    """`times` is None where no row says when it was asked."""

    times: Times | None
    servers: list[Server]
    throughput: Chart | None
    rows: Chart | None
    concurrency: list[Chart]
    seconds: float

    @property
    def held_h(self) -> float:
        """Hours of servers, from the first request of each to its last answer."""
        return sum(server.held_s for server in self.servers) / 3600

    @property
    def busy_h(self) -> float:
        return sum(server.busy_s for server in self.servers) / 3600

    @property
    def tokens(self) -> int:
        return sum(server.tokens for server in self.servers)


def work_of(rows: Rows, history: History) -> Work:
    """Over all records, also those that others have superseded: they were paid for as well."""
    asked = [row for row in rows.records if row.start > 0 and row.server]
    spans = [(key, request) for row in asked for key, request in _requests(row)]
    if not spans:
        return Work(times=None, servers=[], throughput=None, rows=None, concurrency=[], seconds=0.0)
    first, last = min(request.start for _, request in spans), max(request.end for _, request in spans)
    times = Times(first, last)
    names = _names({key for key, _ in spans})
    servers = {key: Server(name=name) for key, name in names.items()}
    tokens = {key: Spread(times) for key in names}
    in_flight = {key: Spread(times) for key in names}
    by_server: dict[Key, list[tuple[float, float]]] = {key: [] for key in names}
    for key, request in spans:
        server = servers[key]
        server.requests += 1
        server.tokens += request.tokens
        server.first, server.last = min(server.first, request.start), max(server.last, request.end)
        server.seconds.append(request.end - request.start)
        tokens[key].add(request.start, request.end, request.tokens)
        in_flight[key].add(request.start, request.end, request.end - request.start)
        by_server[key].append((request.start, request.end))
    for row in asked:
        counted = servers[_key(row)].rows
        counted[row.outcome] = counted.get(row.outcome, 0) + 1
    for key, server in servers.items():
        server.busy_s = covered(by_server[key])
    ordered = sorted(names, key=lambda key: -servers[key].tokens)
    return Work(
        times=times,
        servers=[servers[key] for key in ordered],
        throughput=_throughput(times, [(servers[key], tokens[key]) for key in ordered]),
        rows=_finished(times, asked),
        concurrency=_concurrency(times, ordered, names, in_flight, history),
        seconds=last - first,
    )


def _key(row: Row) -> Key:
    return host_of(row.worker), row.server


def _requests(row: Row) -> Iterable[tuple[Key, Request]]:
    return (((host_of(row.worker), one.server), one) for one in row.requests)


def _names(keys: Iterable[Key]) -> dict[Key, str]:
    """By address alone where there is one host, in order."""
    ordered = sorted(keys)
    several = len({host for host, _ in ordered}) > 1
    return {
        (host, url): f"{host} {address}" if several and host else address
        for host, url in ordered
        for address in [url.partition("://")[2] or url]
    }


def _throughput(times: Times, servers: Sequence[tuple[Server, Spread]]) -> Chart:
    shown = servers if len(servers) <= TONES else servers[: TONES - 1]
    series = [Series(server.name, spread.per_second(), tone(at)) for at, (server, spread) in enumerate(shown)]
    if rest := servers[len(shown) :]:
        sums = [sum(values) for values in zip(*(spread.per_second() for _, spread in rest), strict=True)]
        series.append(Series(f"{len(rest)} others", sums, "rest"))
    total = sum(server.tokens for server, _ in servers)
    best = max((sum(values) for values in zip(*(one.values for one in series), strict=True)), default=0)  # pyright: ignore
    summary = (
        f"{words.number(total)} tokens of {len(servers)} server{'s' * (len(servers) != 1)}, at most "
        f"{words.short(best)} tokens per second over {words.duration(times.width)}."
    )
    return over_time("Tokens per second, by server", times, series, summary=summary, unit="tokens/s")


def _finished(times: Times, rows: Iterable[Row]) -> Chart:
    tones = {"ok": "ok", "truncated": "cut", "failed": "bad"}
    ends = {outcome: Spread(times) for outcome in tones}
    for row in rows:
        if row.outcome in ends:
            end = row.start + max(row.seconds, 0.0)
            ends[row.outcome].add(end, end, 1)
    series = [Series(name, [60 * rate for rate in ends[name].per_second()], one) for name, one in tones.items()]
    series = [one for one in series if any(one.values)]
    return over_time(
        "Rows per minute, by outcome",
        times,
        series,
        summary="When rows ended, in the bin of their last answer.",
        unit="rows/min",
        height=120,
    )


def _concurrency(
    times: Times, ordered: Sequence[Key], names: dict[Key, str], in_flight: dict[Key, Spread], history: History
) -> list[Chart]:
    charts: list[Chart] = []
    for key in ordered[:MOST_CHARTS]:
        values = in_flight[key].per_second()
        limits = _limits(times, key, history)
        known = [limit for limit in limits if limit is not None]
        said = f"On average {sum(values) / len(values):.1f} requests in flight"
        said += (
            f", under a limit between {min(known):.0f} and {max(known):.0f}." if known else "; its limit is not known."
        )
        charts.append(
            over_time(
                names[key],
                times,
                [Series("in flight", values, "accent")],
                outline=[Series("limit", limits, "limit")] if known else [],
                summary=said,
                unit="requests",
                height=96,
            )
        )
    return charts


def _limits(times: Times, key: Key, history: History) -> list[float | None]:
    """The limit at the end of each bin; None while the server was not ready, as far as that is known."""
    changes: list[tuple[float, float | None]] = []
    for one in history.events:
        if host_of(one.process) != key[0]:
            continue
        is_its = one.fields.get("server") == key[1]
        if is_its and one.event in ("server ready", "concurrency changed"):
            changes.append((one.at, float(one.fields.get("limit") or 0)))
        elif one.event == "worker drained" or (is_its and one.event in ("waiting for server", "server removed")):
            changes.append((one.at, None))
    limits: list[float | None] = []
    now, at = None, 0
    for number in range(times.count):
        end = times.start + (number + 1) * times.width
        before = now
        while at < len(changes) and changes[at][0] < end:
            now, at = changes[at][1], at + 1
        limits.append(now if now is not None else before)
    return limits
