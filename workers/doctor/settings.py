"""The settings: what contradicts itself, and what is missing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from draftfleet import tokens
from draftfleet.addresses import expand
from draftfleet.errors import SettingsError
from workers import dialects
from workers.doctor.case import Case
from workers.doctor.findings import Finding, fault, of_error, ok, warning


def look(case: Case) -> Iterator[Finding]:
    where = case.file or "no file: defaults, environment and flags"
    yield ok("file", where, file=case.file or None)
    yield from _target(case)
    yield from _servers(case)
    yield from _context(case)
    yield from _claims(case)
    yield from _data(case)


def _target(case: Case) -> Iterator[Finding]:
    target = case.settings.target
    if not case.settings.model:
        yield fault(
            "target", "target.model is not set: nothing can be produced", "`--model NAME`, as the servers call it"
        )
    if not target.path:
        yield warning(
            "target path",
            "target.path is not set: ids of servers that tell none cannot be made, and none can be compared",
            "`--target FOLDER`, the target's tokenizer.json in it",
        )
    elif target.path.startswith(("/", "./", "../", "~")) and not Path(target.path).expanduser().exists():
        yield fault(
            "target path", f"target.path = {target.path} is not there", "`--target FOLDER` that is on this node"
        )
    else:
        yield ok("target", f"{case.settings.model}, tokenizer from {target.path}", model=case.settings.model)


def _servers(case: Case) -> Iterator[Finding]:
    knobs = case.settings.worker
    try:
        found = expand(knobs.servers)
        if knobs.dialect != "auto":
            dialects.load(knobs.dialect)
    except SettingsError as error:
        yield of_error("servers", error)
        return
    if found:
        yield ok(
            "servers",
            "1 address" if len(found) == 1 else f"{len(found)} addresses",
            servers=[address.url for address in found],
        )
    else:
        yield fault("servers", "worker.servers is empty: nobody would answer", "`--servers http://127.0.0.1:8000`")


def _context(case: Case) -> Iterator[Finding]:
    target, wanted = case.settings.target, case.max_tokens
    limit = target.context_tokens or (tokens.context_tokens(target.path) if target.path else None)
    if limit is None:
        return
    if wanted >= limit:
        yield fault(
            "max_tokens",
            f"sampling.max_tokens = {wanted} leaves no room for a prompt in the {limit} tokens of the target's context",
            f"`--max-tokens {max(limit // 2, 1)}`"
            + (", and no more in the mixture" if case.settings.sampling.mixture else ""),
            max_tokens=wanted,
            context_tokens=limit,
        )
    else:
        yield ok(
            "max_tokens",
            f"{wanted} of the {limit} tokens of the target's context",
            max_tokens=wanted,
            context_tokens=limit,
        )


def _claims(case: Case) -> Iterator[Finding]:
    knobs = case.settings.claims
    if knobs.renew_s * 2 > knobs.ttl_s:
        level = fault if knobs.renew_s >= knobs.ttl_s else warning
        yield level(
            "claims",
            f"claims.renew_s = {knobs.renew_s:g} against claims.ttl_s = {knobs.ttl_s:g}: a late renewal loses a batch",
            f"`--set claims.renew_s={knobs.ttl_s / 4:g}`",
        )


def _data(case: Case) -> Iterator[Finding]:
    knobs = case.settings.producer
    if knobs.heldout == 0 and knobs.split_column is None:
        yield warning(
            "heldout",
            "producer.heldout = 0: `draftfleet evaluate` will have no prompt that was not trained on",
            "`--set producer.heldout=0.02`, unless a column `split` of the data says it",
        )
