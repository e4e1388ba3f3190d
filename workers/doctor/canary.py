"""The canary: real prompts with the run's own sampling, all at once, and what is wrong with their answers."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from draftfleet.errors import BadRequest, DraftfleetError, Mismatch, Overload, Transient, Unauthorized
from draftfleet.records import Prompt
from workers import canary, text_ids
from workers.canary import Canary
from workers.clearance import OUR_OWN
from workers.client import Client
from workers.doctor.case import PROMPTS, Asked, Case, Seen
from workers.doctor.findings import Finding, fault, of_error, ok, skipped, told_apart, warning
from workers.generate import UNRENDERABLE

WARM_UP_TOKENS = 16
LEAST_TOKENS = 32
"""Of an answer, however slow the server is."""


def look(case: Case) -> Iterator[Finding]:
    if not case.ready:
        yield skipped("answers", "no server is ready with the model")
        return
    asked = asyncio.run(_ask_all(case))
    case.asked = [answer for one in asked for answer in one.answers]
    for one in asked:
        yield from _judged(one)
    yield from _in_short(case)


@dataclass(slots=True)
class _OfServer:
    """The answers of one server, and what the worker's own canary says of them."""

    seen: Seen
    answers: list[Asked]
    findings: list[Finding]


async def _ask_all(case: Case) -> list[_OfServer]:
    client = Client(case.settings.worker)
    prompts = case.prompts or [OUR_OWN]
    count = max(PROMPTS if case.prompts else 1, len(case.ready))
    shares: dict[str, list[Prompt]] = {seen.url: [] for seen in case.ready}
    for number in range(count):
        shares[case.ready[number % len(case.ready)].url].append(prompts[number % len(prompts)])
    if len(case.prompts) < PROMPTS:  # asking one prompt twice tells nothing
        shares = {url: list({id(prompt): prompt for prompt in share}.values()) for url, share in shares.items()}
    try:
        return list(await asyncio.gather(*(_ask_server(case, client, seen, shares[seen.url]) for seen in case.ready)))
    finally:
        await client.close()


async def _ask_server(case: Case, client: Client, seen: Seen, prompts: Sequence[Prompt]) -> _OfServer:
    """A short warm-up first: its pace says how long an answer may be and still come in time."""
    warm_up = await _ask(case, client, seen, prompts[0], WARM_UP_TOKENS)
    if warm_up.completion is None:
        return _OfServer(seen, [warm_up], [])
    pace = warm_up.seconds / max(warm_up.completion.completion_tokens, 1)
    tokens = min(canary.TOKENS, max(LEAST_TOKENS, int(case.limits.answer_s / 2 / max(pace, 1e-6))))
    answers = await asyncio.gather(*(_ask(case, client, seen, prompt, tokens) for prompt in prompts))
    return _OfServer(seen, list(answers), await _checked(case, client, seen, answers))


def canary_of(case: Case, client: Client, seen: Seen, prompt: Prompt, max_tokens: int | None = None) -> Canary:
    """As the worker has it; with `max_tokens`, answers are no longer than that."""
    sampling = case.sampling_for(prompt)
    if max_tokens is not None:
        sampling = sampling.model_copy(update={"max_tokens": min(max_tokens, sampling.max_tokens)})
    return Canary(
        partial(client.complete, seen.url), seen.url, seen.dialect, case.model, sampling, prompt, case.tokenizer
    )


async def _ask(case: Case, client: Client, seen: Seen, prompt: Prompt, max_tokens: int) -> Asked:
    one = canary_of(case, client, seen, prompt, max_tokens)
    begun = time.monotonic()
    asked = Asked(seen.url, prompt, one.sampling.max_tokens, 0.0)
    try:
        async with asyncio.timeout(case.limits.answer_s):
            body, completion, seconds = await one.ask()
    except TimeoutError:
        error = Transient(f"{seen.url} gave no answer of {max_tokens} tokens within {case.limits.answer_s:g} s")
        return replace(asked, seconds=time.monotonic() - begun, error=error)
    except (DraftfleetError, *UNRENDERABLE) as error:
        return replace(asked, seconds=time.monotonic() - begun, error=error)
    ids, source = completion.token_ids, "engine"
    if ids is None and case.tokenizer is not None:
        ids, source = text_ids.retokenized(case.tokenizer, prompt, one.sampling, completion), "retokenized"
    return replace(
        asked,
        seconds=seconds,
        completion=completion,
        message=_message(body),
        ids=tuple(ids or ()),
        ids_source="none" if ids is None else source,
    )


def _message(body: dict[str, Any]) -> dict[str, Any]:
    """Of a chat completion; other forms of answer have none."""
    choices = body.get("choices") or [{}]
    return choices[0].get("message") or {}


async def _checked(case: Case, client: Client, seen: Seen, answers: Sequence[Asked]) -> list[Finding]:
    """What the worker's canary would stop at, or warn of. Rows that think and rows that do not are two things."""
    answered = [asked for asked in answers if asked.completion is not None]
    if not answered:
        return []
    found = list(_unread(seen, answered))
    kinds: dict[bool | None, list[Asked]] = {}
    for asked in answered:
        kinds.setdefault(case.sampling_for(asked.prompt).thinking, []).append(asked)
    if not found:
        checks = [_reasoning_checked(case, client, seen, kind) for kind in kinds.values()]
        found = [finding for findings in await asyncio.gather(*checks) for finding in findings]
    return found + _ids_checked(case, client, seen, answered)


async def _reasoning_checked(case: Case, client: Client, seen: Seen, answered: Sequence[Asked]) -> list[Finding]:
    """Of one answer, one with a thought where there is any."""
    first = next((asked for asked in answered if asked.completion and asked.completion.reasoning), answered[0])
    assert first.completion is not None
    one = canary_of(case, client, seen, first.prompt, max(LEAST_TOKENS, first.max_tokens))
    try:
        async with asyncio.timeout(case.limits.answer_s / 2):
            warnings = await one.check_reasoning(first.completion, first.message)
    except TimeoutError:
        return [skipped("reasoning", f"{seen.url} took too long over the question whether it thinks")]
    except DraftfleetError as error:
        return [of_error("reasoning", error)]
    return [_warned("reasoning", text, seen) for text in warnings]


def _unread(seen: Seen, answered: Sequence[Asked]) -> Iterator[Finding]:
    fields = Counter(name for asked in answered for name in canary.unread_fields(asked.message))
    for name, count in fields.items():
        yield fault(
            "reasoning",
            f"{seen.url} sends text in message.{name}, in {count} of {len(answered)} answers, which no dialect reads: "
            "every row would lose it",
            "start it with the reasoning parser of its model (vLLM: `--reasoning-parser NAME`), or set worker.dialect",
            server=seen.url,
            field=name,
        )


def _ids_checked(case: Case, client: Client, seen: Seen, answered: Sequence[Asked]) -> list[Finding]:
    """Each kind of finding once, with how many answers had it."""
    kinds: dict[str, tuple[Finding, int]] = {}
    for asked in answered:
        assert asked.completion is not None
        one = canary_of(case, client, seen, asked.prompt)
        if asked.completion.model not in ("", case.model):
            text = f"{seen.url} answers as {asked.completion.model!r}, and {case.model!r} is asked for"
            found = [fault("model", text, "start it with that model", server=seen.url)]
        else:
            try:
                texts = one.check_ids(asked.completion, one.prompt_ids())
                found = [_warned("ids", text, seen) for text in texts]
            except Mismatch as error:
                found = [of_error("ids", error)]
            except UNRENDERABLE as error:
                found = [_warned("ids", f"the template of target.path cannot render a prompt: {error!r}", seen)]
        for one_found in found:
            kind = f"{one_found.level} {one_found.fix}"
            first, count = kinds.get(kind, (one_found, 0))
            kinds[kind] = first, count + 1
    return [replace(one, found=f"{one.found} ({count} of {len(answered)} answers)") for one, count in kinds.values()]


def _warned(check: str, text: str, seen: Seen) -> Finding:
    found, advice = told_apart(text)
    fixes = {
        "reasoning": "sampling.thinking as the model does it: `--thinking`, `--no-thinking`, or unset",
        "ids": "a server that tells exact ids (vLLM), or bear with it: such rows are counted",
    }
    return warning(check, found, advice or fixes[check], server=seen.url)


def _judged(one: _OfServer) -> Iterator[Finding]:
    """Prompts without an answer first: each kind of error once."""
    failed = [asked for asked in one.answers if asked.error is not None]
    kinds: dict[str, list[Asked]] = {}
    for asked in failed:
        kinds.setdefault(type(asked.error).__name__, []).append(asked)
    for group in kinds.values():
        error, count = group[0].error, f"{len(group)} of {len(one.answers)} prompts"
        none_answered = len(failed) == len(one.answers)
        level = "fault" if none_answered or isinstance(error, Mismatch | Unauthorized) else "warning"
        match error:
            case Overload():
                fix = "find its other clients, or set worker.concurrency to what it takes"
            case BadRequest():
                fix = "correct sampling and sampling.extra_body, or start it with what they need; `--show` says which"
            case Transient():
                fix = "look at the server's own log"
            case _:
                fix = ""
        if isinstance(error, DraftfleetError):
            found = of_error("answers", error, fix, level)
        else:
            found = Finding(level, "answers", f"a prompt cannot be rendered: {error!r}", "look at the row; `--show`")
        yield replace(found, found=f"{one.seen.url}, {count}: {found.found}", values={"server": one.seen.url})
    yield from one.findings


def _in_short(case: Case) -> Iterator[Finding]:
    answered = [asked for asked in case.asked if asked.completion is not None]
    if not answered:
        return
    completions = [asked.completion for asked in answered if asked.completion is not None]
    reasoning = Counter(one.reasoning_source for one in completions if one.reasoning)
    matching = sum(len(asked.ids) == asked.completion.completion_tokens for asked in answered if asked.completion)
    cut = sum(one.outcome == "truncated" for one in completions)
    cut_by_run = sum(
        asked.is_cut_by_us and asked.max_tokens >= case.sampling_for(asked.prompt).max_tokens for asked in answered
    )
    tokens = sum(max(one.completion_tokens, 0) for one in completions)
    rate = tokens / max(sum(asked.seconds for asked in answered), 1e-6)
    where = ", ".join(f"{count} in {source}" for source, count in reasoning.items()) or "none"
    values = {
        "asked": len(case.asked),
        "answered": len(answered),
        "with_reasoning": reasoning.total(),
        "truncated": cut,
        "ids_match": matching,
        "mean_tokens": tokens / len(answered),
        "tokens_per_s_each": rate,
    }
    yield ok(
        "answers",
        f"{len(answered)} of {len(case.asked)} prompts answered; reasoning: {where}; {cut} cut at "
        f"{max(asked.max_tokens for asked in answered)} tokens; ids match the count in {matching}; "
        f"{tokens / len(answered):.0f} tokens each at {rate:.0f} a second",
        **values,
    )
    if cut_by_run * 2 > len(answered):
        yield warning(
            "truncated",
            f"{cut_by_run} of {len(answered)} answers were cut at sampling.max_tokens = {case.max_tokens}",
            f"`--max-tokens {4 * case.max_tokens}` in a new run",
        )
