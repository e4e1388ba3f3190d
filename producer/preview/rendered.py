"""A dry run for a person: lines of text, coloured on a terminal, marked in words everywhere."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from producer.preview.lengths import Lengths
from producer.preview.masks import Ask, Shown
from producer.preview.survey import Survey
from producer.preview.work import Work

if TYPE_CHECKING:
    from producer.preview.dry_run import DryRun

PROMPT, TRAINED, SPECIAL, HEAD, WARNING = "", "green", "bold cyan", "bold", "yellow"
MOST_CHARACTERS = 4000
"""Of one text that is shown. Of a longer one beginning and end are; `--json` has all of it."""

BAR = 40
_PICTURES = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"}
_VISIBLE = _PICTURES | dict.fromkeys(range(0x7F, 0xA0), 0xFFFD)
"""Control characters as their pictures: a prompt shall not steer the terminal."""


def render(found: DryRun, console: Console) -> None:
    special = _special(found.special_texts)
    for line in [*_lines(found), *_prompts(found.shown, found.lengths.max_tokens, special), *_work(found.work)]:
        console.print(line)


def _lines(found: DryRun) -> Iterator[Text]:
    yield Text(f"dry run of run {found.run}: nothing was written", HEAD)
    yield from (Text(f"  ! {_visible(note)}", WARNING) for note in found.notes)
    yield from _counts(found.survey)
    yield from _lengths(found.lengths)


def _counts(met: Survey) -> Iterator[Text]:
    yield Text(f"\ndata set {met.source}", HEAD)
    yield _row("lines", f"{met.lines:,} = {_sum(met)}")
    yield _row("prompts", f"{met.new:,} new + {met.already:,} already in the run")
    yield _row("split", f"{met.train:,} train + {met.heldout:,} held out; {met.overlap:,} held-out texts among train")
    reasons = {"malformed": met.malformed} | met.rejected_for
    for reason, count in reasons.items():
        if count:
            yield _row("malformed" if reason == "malformed" else "rejected", _fault(reason, count, met.examples))
    yield _row("user turns", ", ".join(f"{count:,} with {turns}" for turns, count in _grouped(met.turns).items()))
    yield _row("have", f"{met.with_system:,} system, {met.with_tools:,} tools, {met.with_tool_calls:,} tool calls")
    yield _row("answers", f"{met.answers:,} to be asked for the new prompts")
    if len(met.sources) > 1:
        for source, one in met.sources.items():
            share = one.prompts / met.prompts
            counts = f"{one.prompts:,} prompts ({share:.1%}), {one.train:,} train + {one.heldout:,} held out"
            faults = f"{one.duplicates:,} duplicates, {one.malformed:,} malformed, {one.rejected:,} rejected"
            left = "" if one.ended else "; not read to its end, as another source had ended"
            yield _row("source", f"{source}: {one.lines:,} lines, {counts}; {faults}{left}")


def _sum(met: Survey) -> str:
    names = ("prompts", "duplicates", "malformed", "rejected")
    return " + ".join(f"{getattr(met, name):,} {name}" for name in names)


def _fault(reason: str, count: int, examples: dict[str, str]) -> str:
    example = _visible(examples.get(reason, ""))
    said = f"{count:,}" if reason == "malformed" else f"{count:,} {reason}"
    return f"{said}; first {example}" if example else said


def _grouped(turns: dict[int, int]) -> dict[str, int]:
    """Those of nine and more turns together."""
    found: dict[str, int] = {}
    for number, count in turns.items():
        name = str(number) if number < 9 else "9 or more"
        found[name] = found.get(name, 0) + count
    return found


def _lengths(lengths: Lengths) -> Iterator[Text]:
    of = "all" if lengths.measured == lengths.of else f"{lengths.measured:,} of {lengths.of:,}, drawn by hash"
    yield Text(f"\nprompt lengths in {lengths.unit} ({of})", HEAD)
    if not lengths.histogram:
        yield _row("none", "no prompt could be measured")
        return
    quantiles = f"median {lengths.median:,}, 90 % {lengths.p90:,}, 99 % {lengths.p99:,}"
    yield _row("mean", f"{lengths.mean:,.0f}, {quantiles}, longest {lengths.most:,} ({lengths.longest})")
    most = max(bar.prompts for bar in lengths.histogram)
    for bar in lengths.histogram:
        drawn = "█" * max(round(BAR * bar.prompts / most), 1 if bar.prompts else 0)
        yield Text(f"  {bar.least:>9,} - {bar.most:<9,} {drawn} {bar.prompts:,}")
    if lengths.unit == "tokens" and lengths.context_tokens is not None:
        yield _row("context", f"{lengths.context_tokens:,} tokens, max_tokens {lengths.max_tokens:,}")
        yield _row("over it", f"{_scaled(lengths, lengths.too_long)} prompts leave no room for an answer: they fail")
        yield _row("cut", f"{_scaled(lengths, lengths.cut)} prompts leave less room than max_tokens: asked for less")
    if len(lengths.mean_by_source) > 1:
        for source, mean in lengths.mean_by_source.items():
            yield _row("source", f"{source}: mean {mean:,.0f} {lengths.unit}")


def _scaled(lengths: Lengths, count: int | None) -> str:
    if count is None:
        return "?"
    said = lengths.stand_for(count)
    return said if lengths.measured == lengths.of else f"{count:,} of those measured, so {said}"


def _prompts(some: list[Shown], max_tokens: int, special: re.Pattern[str] | None) -> Iterator[Text]:
    for number, one in enumerate(some, 1):
        tokens = "" if one.tokens is None else f", {one.tokens:,} tokens"
        tools = f", {_plural(one.tools, 'tool')}" if one.tools else ""
        messages = _plural(one.messages, "message")
        head = f"\nprompt {number} of {len(some)}: {one.prompt_id}, {one.split}, {messages}{tools}{tokens}"
        yield Text(head, HEAD)
        if one.fault:
            yield Text(f"  ! {_visible(one.fault)}", WARNING)
        elif not one.rendered:
            yield Text("  not as the model will see it: there is no tokenizer, so no template", WARNING)
        if one.tools_unseen:
            yield Text("  ! the chat template leaves its tools out: the model does not know of them", WARNING)
        for ask in one.asks if not one.fault else ():
            yield from _ask(ask, max_tokens, special)


def _ask(ask: Ask, max_tokens: int, special: re.Pattern[str] | None) -> Iterator[Text]:
    if ask.of > 1:
        yield Text(f"  answer {ask.number} of {ask.of}, a training row of its own", HEAD)
    if ask.follows:
        yield from _gutter("all of the above, and then", "prompt", PROMPT, None)
    yield from _gutter(_shortened(ask.prompt), "prompt", PROMPT, special)
    if ask.completion:
        yield from _gutter(_shortened(ask.completion) + ask.end, "TRAINED", TRAINED, special)
        yield from _gutter("(the source's answer, in whose place the target's comes)", "", "dim", None)
    else:
        thought = ", which begins inside its thought" if ask.in_thought else ""
        slot = f"(the target's answer{thought}, at most {max_tokens:,} tokens) {ask.end}"
        yield from _gutter(slot, "TRAINED", TRAINED, special)


def _gutter(text: str, label: str, style: str, special: re.Pattern[str] | None) -> Iterator[Text]:
    """Each line with what becomes of it; a mark where the text itself has the line's end."""
    lines = text.split("\n")
    for number, line in enumerate(lines):
        if number == len(lines) - 1 and not line and number:
            return
        shown = Text(_visible(line), style)
        if special is not None:
            shown.highlight_regex(special, SPECIAL)
        end = Text("↵", "dim") if number < len(lines) - 1 else Text("")
        yield Text.assemble((f"  {label:>7} │ ", "dim"), shown, end)


def _shortened(text: str) -> str:
    if len(text) <= MOST_CHARACTERS:
        return text
    left_out = len(text) - MOST_CHARACTERS
    half = MOST_CHARACTERS // 2
    return f"{text[:half]}\n… {left_out:,} characters are not shown, --json has them …\n{text[-half:]}"


def _work(work: Work) -> Iterator[Text]:
    yield Text("\nwork for the new prompts", HEAD)
    because = work.because
    yield _row("answers", f"{work.answers:,} of {work.mean_tokens:,.0f} tokens on average ({because['mean_tokens']})")
    yield _row("tokens", f"{work.tokens:,} to be generated after {work.prompt_tokens:,} of prompts")
    yield _row("servers", f"{work.servers} ({because['servers']})")
    yield _row("speed", because["tokens_per_s"])
    for one in work.hours:
        hours = f"{_time(one.server_hours)} of servers, {_time(one.hours)} from first to last"
        yield _row("", f"{one.tokens_per_s:,.0f} tokens/s per server: {hours}")
    yield _row("", "GPU hours are hours of servers times the GPUs of one server")
    free = "" if work.free_bytes is None else f"; {_size(work.free_bytes)} are free"
    yield _row("storage", f"{_size(work.bytes)} ({because['bytes']}){free}")


def _plural(count: int, word: str) -> str:
    return f"{count:,} {word}" + ("" if count == 1 else "s")


def _row(name: str, text: str) -> Text:
    return Text(f"  {name:10} {text}")


def _time(hours: float) -> str:
    if hours < 1:
        return f"{hours * 60:.1f} min"
    return f"{hours:,.0f} h" if hours >= 10 else f"{hours:.1f} h"


def _size(count: int) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if count >= size:
            return f"{count / size:,.1f} {unit}"
    return f"{count / 1e3:,.1f} kB"


def _visible(text: str) -> str:
    return text.translate(_VISIBLE)


def _special(texts: list[str]) -> re.Pattern[str] | None:
    found = sorted(filter(None, texts), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, found))) if found else None
