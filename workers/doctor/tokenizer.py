"""The tokenizer of `target.path` against the one that the servers use: the ids of the same prompts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from draftfleet import tokens
from draftfleet.errors import DraftfleetError
from draftfleet.records import Prompt
from draftfleet.tokens import TargetTokenizer
from workers import text_ids
from workers.client import Client
from workers.dialects import decode
from workers.doctor.canary import canary_of
from workers.doctor.case import Case, Seen
from workers.doctor.findings import Finding, fault, of_error, ok, skipped, warning
from workers.generate import UNRENDERABLE

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}

UNICODE = "Übersetze „naïve façade“ — 日本語, العربية, हिन्दी, 👩‍👩‍👧 \u00a0 \t x² + ½"
CODE = "def f(x):\n    return x  # <think> is no tag here\n\n\n\tif x:\r\n"


def _asked(*messages: tuple[str, str], tools: list[dict[str, Any]] | None = None) -> Prompt:
    return Prompt("0" * 32, "train", [{"role": role, "content": text} for role, text in messages], tools)


PROMPTS = {
    "unicode": _asked(("user", UNICODE)),
    "code": _asked(("user", CODE)),
    "system and history": _asked(("system", "Be brief."), ("user", "Hi."), ("assistant", "Hello."), ("user", "Bye.")),
    "tools": _asked(("user", "How is the weather in Oslo?"), tools=[TOOL]),
}

FIX = "name the served model's own folder in `--target`; for another chat template, vLLM: `--chat-template FILE`"


def load(case: Case) -> Iterator[Finding]:
    path = case.settings.target.path
    if not path:
        yield skipped("load", "target.path is not set")
        return
    case.tokenizer = tokens.load(path)
    size = case.tokenizer.vocab_size
    yield ok("load", f"{path}: {size:,} tokens, turns end with {case.tokenizer.end_of_turn!r}", vocab_size=size)


def compare(case: Case) -> Iterator[Finding]:
    if case.tokenizer is None or not case.ready:
        yield skipped("ids", "no tokenizer to compare" if case.ready else "no server is ready with the model")
        return
    yield from asyncio.run(_compare_all(case, case.tokenizer))


@dataclass(frozen=True, slots=True)
class _Pair:
    """The same prompt in two tokenizers. `theirs` is a count where the server tells no ids."""

    prompt: str
    ours: list[int]
    theirs: list[int] | int

    @property
    def is_equal(self) -> bool:
        return (len(self.ours) if isinstance(self.theirs, int) else self.ours) == self.theirs


async def _compare_all(case: Case, tokenizer: TargetTokenizer) -> list[Finding]:
    client = Client(case.settings.worker)
    try:
        found = await asyncio.gather(*(_compare(case, client, seen, tokenizer) for seen in case.ready))
        return [finding for findings in found for finding in findings]
    finally:
        await client.close()


async def _compare(case: Case, client: Client, seen: Seen, tokenizer: TargetTokenizer) -> list[Finding]:
    prompts = PROMPTS | {"the first": case.prompts[0]} if case.prompts else PROMPTS
    answers = await asyncio.gather(*(_pair(case, client, seen, name, one) for name, one in prompts.items()))
    pairs = [answer for answer in answers if isinstance(answer, _Pair)]
    pairs += await _plain(client, seen, tokenizer, case.model)
    found = [
        _refused(case, seen, name, why) for name, why in zip(prompts, answers, strict=True) if isinstance(why, str)
    ]
    different = [pair for pair in pairs if not pair.is_equal]
    if different:
        found.append(
            fault(
                "ids",
                f"{seen.url} reads {len(different)} of {len(pairs)} prompts as other tokens than target.path = "
                f"{tokenizer.path!r}: {_difference(different[0], tokenizer)}",
                FIX,
                server=seen.url,
                different=[pair.prompt for pair in different],
            )
        )
    elif pairs:
        by = "counts" if all(isinstance(pair.theirs, int) for pair in pairs) else "ids"
        names = ", ".join(pair.prompt for pair in pairs)
        found.append(ok("ids", f"{seen.url}: the same {by} for {len(pairs)} prompts ({names})", server=seen.url, by=by))
    return found


def _refused(case: Case, seen: Seen, name: str, why: str) -> Finding:
    """A prompt that could not be compared. Tools matter where the data has some."""
    if name == "tools" and any(prompt.tools for prompt in case.prompts):
        fix = "start it so that it takes tools (vLLM: `--enable-auto-tool-choice --tool-call-parser NAME`)"
        return warning(name, f"{seen.url} takes no tools, and your prompts have some: {why}", fix, server=seen.url)
    return skipped(name, f"{seen.url}: {why}")


async def _pair(case: Case, client: Client, seen: Seen, name: str, prompt: Prompt) -> _Pair | str:
    """Asked for one token. A text says why it could not be compared."""
    one = canary_of(case, client, seen, prompt, 1)
    assert one.tokenizer is not None
    try:
        ours = text_ids.prompt_ids(one.tokenizer, prompt, one.sampling)
    except UNRENDERABLE as error:
        return f"the template of target.path does not render it ({type(error).__name__})"
    try:
        async with asyncio.timeout(case.limits.answer_s):
            _, completion, _ = await one.ask()
    except TimeoutError:
        return f"no answer within {case.limits.answer_s:g} s"
    except DraftfleetError as error:
        return of_error(name, error).found
    if completion.prompt_token_ids is not None:
        return _Pair(name, ours, completion.prompt_token_ids)
    if completion.prompt_tokens >= 0:
        return _Pair(name, ours, completion.prompt_tokens)
    return "it tells neither ids nor counts"


async def _plain(client: Client, seen: Seen, tokenizer: TargetTokenizer, model: str) -> list[_Pair]:
    """Text without a template, where the server has a page for it: vLLM and llama.cpp name its field differently."""
    found: list[_Pair] = []
    for name, text in (("plain unicode", UNICODE), ("plain code", CODE)):
        body = {"model": model, "prompt": text, "content": text, "add_special_tokens": False}
        try:
            async with asyncio.timeout(5):
                status, _, raw = await client.complete(seen.url, "/tokenize", body)
            said = decode(raw).get("tokens") if status == 200 else None
        except (TimeoutError, DraftfleetError, json.JSONDecodeError):
            break
        if not isinstance(said, list) or not all(isinstance(one, int) for one in said):
            break
        found.append(_Pair(name, tokenizer.encode(text), said))
    return found


def _difference(pair: _Pair, tokenizer: TargetTokenizer) -> str:
    if isinstance(pair.theirs, int):
        return f"{pair.prompt!r} is {pair.theirs} there and {len(pair.ours)} here"
    at = next((i for i, (a, b) in enumerate(zip(pair.theirs, pair.ours, strict=False)) if a != b), None)
    lengths = f"{pair.prompt!r} is {len(pair.theirs)} there and {len(pair.ours)} here"
    if at is None:
        return lengths
    theirs, ours = pair.theirs[at], pair.ours[at]
    return f"{lengths}, the first other id is number {at}: {theirs} there, {ours} ({tokenizer.decode([ours])!r}) here"
