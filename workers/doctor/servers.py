"""The inference servers: which are there, what each says of itself, and who else asks them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any, cast

from draftfleet.addresses import Address, expand
from draftfleet.errors import DraftfleetError
from draftfleet.settings import Worker
from workers import dialects, gauges
from workers.client import Client, Look, Unreachable
from workers.dialects.openai import context_tokens, model_entries
from workers.doctor.case import Case, Seen
from workers.doctor.findings import Finding, fault, of_error, ok, skipped, told_apart, warning

VERSIONS = ("/version", "/get_server_info", "/props")
"""Pages that say it: vLLM, SGLang, llama.cpp."""

VERSION_KEYS = ("version", "sglang_version", "build_info")

SPECULATES = ("vllm:spec_decode_num_drafts", "sglang:spec_accept_length")
"""vLLM shows its counter only where it drafts, SGLang shows 0 where it does not."""

METRICS_FLAGS = {"sglang": "--enable-metrics", "llamacpp": "--metrics"}
"""By the owner that a server names for its model."""


def look(case: Case) -> Iterator[Finding]:
    addresses = expand(case.settings.worker.servers)
    if not addresses:
        yield skipped("ready", "none is named")
        return
    answers = asyncio.run(_look_at_all(addresses, case.settings.worker, case.limits.look_s - 1))
    present = {url: found for url, found in answers.items() if isinstance(found, _Answer)}
    yield from _missing(addresses, answers)
    model = case.settings.model
    for url, answer in present.items():
        seen = yield from _seen(case, url, answer, model)
        if seen is not None:
            model = model or seen.model or ""
            case.seen.append(seen)
    yield from _alike(case)


class _Answer:
    def __init__(self, look: Look, version: str) -> None:
        self.look = look
        self.version = version


async def _look_at_all(addresses: list[Address], knobs: Worker, limit_s: float) -> dict[str, _Answer | Unreachable]:
    client = Client(knobs)
    try:
        looks = [_look_at(client, address.url, limit_s) for address in addresses]
        return dict(zip([address.url for address in addresses], await asyncio.gather(*looks), strict=True))
    finally:
        await client.close()


async def _look_at(client: Client, url: str, limit_s: float) -> _Answer | Unreachable:
    try:
        async with asyncio.timeout(limit_s):
            seen = await client.look(url, is_new=True)
            return _Answer(seen, await _version(client, url))
    except Unreachable as error:
        return error
    except TimeoutError:
        return Unreachable(f"no answer within {limit_s:g} s", refused=False)


async def _version(client: Client, url: str) -> str:
    """As the server says it; "" where it does not."""
    for path in VERSIONS:
        try:
            status, text = await client.get(url, path)
            said = json.loads(text) if status == 200 else None
        except (Unreachable, ValueError):
            continue
        if isinstance(said, dict):
            found = [cast(dict[str, Any], said).get(key) for key in VERSION_KEYS]
            if version := next((str(value) for value in found if value), ""):
                return version
    return ""


def _missing(addresses: list[Address], answers: dict[str, _Answer | Unreachable]) -> Iterator[Finding]:
    away = [(one, error) for one in addresses if isinstance(error := answers[one.url], Unreachable)]
    for address, error in away:
        if error.refused and not address.is_named:
            continue
        if "answered 401" in str(error) or "answered 403" in str(error):
            fix = "worker.api_key, or worker.api_keys for this server, with a key that it accepts"
            yield fault("ready", f"{address.url} wants another key: {error}", fix, server=address.url)
        elif "answered 503" in str(error):
            found = f"{address.url} is not ready: {error}. Workers wait for it; nothing else of it can be looked at"
            yield warning("ready", found, "wait, then `draftfleet doctor` again", server=address.url)
        else:
            found = f"nothing listens at {address.url}" if error.refused else f"{address.url} does not answer: {error}"
            yield fault("ready", found, "start it, or correct worker.servers", server=address.url)
    if len(away) == len(addresses) and not any(address.is_named for address, _ in away):
        yield fault(
            "ready",
            f"nothing listens at any of the {len(addresses)} ports of the range",
            "start the servers, or correct worker.servers",
        )


def _seen(case: Case, url: str, answer: _Answer, model: str) -> Iterator[Finding]:
    """Yields what is wrong, then one line of all that it says. Returns the server."""
    look, version = answer.look, answer.version
    entries = model_entries(look.models)
    served = [str(entry["id"]) for entry in entries]
    try:
        dialect = yield from _dialect(case, url, look)
    except DraftfleetError as error:
        yield of_error("dialect", error)
        return None
    wanted = model or next(iter(served), "")
    entry = next((entry for entry in entries if entry["id"] == wanted), {})
    if not entry:
        yield fault(
            "model",
            f"{url} serves {', '.join(map(repr, served)) or 'no model'}, and {wanted!r} is asked for",
            f"start it with that model (vLLM: `--served-model-name {wanted}`), or `--model {', '.join(served)}`",
            server=url,
            served=served,
        )
    seen = Seen(
        url=url,
        dialect=dialect,
        model=wanted if entry else None,
        entry=entry,
        metrics=look.metrics,
        gauges=gauges.read(look.metrics),
        version=version,
        models=look.models,
        context_tokens=context_tokens(entry),
    )
    yield from _of_entry(case, seen)
    yield from _of_metrics(seen)
    if entry:
        yield _in_short(seen)
    return seen


def _dialect(case: Case, url: str, look: Look) -> Iterator[Finding]:
    named = case.settings.worker.dialect
    found = dialects.detect(look.models, look.metrics, look.headers, look.greeting) or "openai"
    if found in dialects.UNSUITABLE and named != found:
        text, fix = told_apart(dialects.UNSUITABLE[found])
        yield fault("dialect", f"{url} is left out: {text}", fix, server=url)
    elif named not in ("auto", found):
        yield warning(
            "dialect",
            f"{url} speaks like {found}, and worker.dialect = {named}",
            "`--dialect auto`, unless you know better",
            server=url,
        )
    return dialects.load(found if named == "auto" else named)


def _of_entry(case: Case, seen: Seen) -> Iterator[Finding]:
    wanted = case.max_tokens
    if seen.context_tokens is not None and wanted >= seen.context_tokens:
        yield fault(
            "context",
            f"sampling.max_tokens = {wanted} leaves no room for a prompt in the {seen.context_tokens} tokens of "
            f"context at {seen.url}",
            f"`--max-tokens {seen.context_tokens // 2}`, or a longer context (vLLM: `--max-model-len`)",
            server=seen.url,
            context_tokens=seen.context_tokens,
        )
    if parent := seen.entry.get("parent"):
        yield warning(
            "model",
            f"{seen.model} at {seen.url} is an adapter of {parent}: a drafter is trained on a target without one",
            f"`--model {parent}`, or merge the adapter",
            server=seen.url,
        )
    if not seen.dialect.GIVES_TOKEN_IDS and not case.settings.target.path:
        yield fault(
            "ids",
            f"{seen.url} ({seen.dialect.NAME}) tells no token ids, and target.path is not set",
            "`--target FOLDER`, the target's tokenizer.json in it",
            server=seen.url,
        )


def _of_metrics(seen: Seen) -> Iterator[Finding]:
    if seen.gauges is None and (flag := METRICS_FLAGS.get(str(seen.entry.get("owned_by")))):
        yield warning(
            "gauges",
            f"{seen.url} shows no gauges: its load is guessed from its answers, and a stall is found late",
            f"start it with `{flag}`",
            server=seen.url,
        )
    if _speculates(seen.metrics):
        yield warning(
            "speculation",
            f"{seen.url} decodes speculatively: fine for answers, but hidden states cannot be captured from it",
            "nothing for `draftfleet work`; to train from its hidden states, start it without a drafter",
            server=seen.url,
        )


def _speculates(metrics: str) -> bool:
    lines = [line.split() for line in metrics.splitlines() if line.startswith(SPECULATES)]
    return any(line[0].startswith("vllm:") or line[-1] not in ("0", "0.0") for line in lines)


def _in_short(seen: Seen) -> Finding:
    root = seen.entry.get("root")
    revision = seen.entry.get("revision")
    about = [
        f"{seen.dialect.NAME} {seen.version}".strip(),
        f"model {seen.model}",
        *([f"from {root}"] if root and root != seen.model else []),
        *([f"revision {revision}"] if revision else []),
        f"context {seen.context_tokens or 'not told'}",
        "gauges" if seen.gauges else "no gauges",
    ]
    return ok(
        "ready",
        f"{seen.url}: {', '.join(about)}",
        server=seen.url,
        dialect=seen.dialect.NAME,
        version=seen.version or None,
        model=seen.model,
        root=root,
        revision=revision,
        context_tokens=seen.context_tokens,
        has_gauges=seen.gauges is not None,
    )


def _alike(case: Case) -> Iterator[Finding]:
    """Servers of one worker should serve the same thing."""
    told = {
        "version": {seen.url: seen.version for seen in case.ready},
        "root": {seen.url: str(seen.entry.get("root") or "") for seen in case.ready},
        "context": {seen.url: str(seen.context_tokens or "") for seen in case.ready},
    }
    for what, values in told.items():
        different = {value for value in values.values() if value}
        if len(different) > 1:
            listed = ", ".join(f"{url}: {value}" for url, value in values.items())
            yield warning("alike", f"the servers differ in {what}: {listed}", "start all of them alike")


def others(case: Case) -> Iterator[Finding]:
    """Requests that were there before the canary asked."""
    ours = {server.url: report.process for report in case.workers for server in report.servers if server.in_flight}
    for seen in case.ready:
        if seen.gauges is None:
            yield skipped("other clients", f"{seen.url} shows no gauges")
            continue
        running, waiting = int(seen.gauges.running or 0), int(seen.gauges.waiting or 0)
        values = {"server": seen.url, "running": running, "waiting": waiting}
        if not running + waiting:
            yield ok("other clients", f"{seen.url} had nothing to do", **values)
        elif seen.url in ours:
            found = f"{seen.url} had {running} requests running and {waiting} waiting, and {ours[seen.url]} works there"
            yield ok("other clients", found, **values)
        else:
            yield warning(
                "other clients",
                f"{seen.url} had {running} requests running and {waiting} waiting, of which no worker knows",
                "find its other client, or set worker.concurrency to what it leaves free",
                **values,
            )
