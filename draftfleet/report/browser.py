"""The rows that a person can look at: some by lot, and the extremes."""

from __future__ import annotations

import hashlib
import heapq
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from draftfleet import fleet, shards, tokens
from draftfleet.columns import sample_of
from draftfleet.errors import CorruptFile, RunMissing, RunNewer, TargetError
from draftfleet.records import Conversation, Sample
from draftfleet.report.pieces import Pieces
from draftfleet.report.rows import Row, Rows
from draftfleet.runs import Run
from draftfleet.settings import Settings
from draftfleet.thoughts import CLOSE

JSON = dict[str, Any]

EXTREMES = 6
"""Of each kind."""

MOST_CHARS = 12_000
"""Of a text that is shown; of a longer one its beginning and its end."""

TAIL_CHARS = 2_000
MOST_MESSAGES = 40
MOST_PROMPT_TOKENS, MOST_TOKENS, TAIL_TOKENS = 120, 600, 100


def chosen(rows: Rows, count: int, seed: int) -> list[tuple[Row, list[str]]]:
    """Rows with why each was taken, the same for the same rows and seed in whatever order they come."""

    def lot(row: Row) -> bytes:
        return hashlib.blake2b(f"{seed}:{row.row_key}".encode(), digest_size=8).digest()

    every = rows.rows
    answered = [row for row in every if row.outcome != "failed"]
    by_why: dict[str, Iterable[Row]] = {
        "random": heapq.nsmallest(count, every, key=lot),
        "longest": heapq.nlargest(EXTREMES, answered, key=lambda row: row.tokens),
        "slowest": heapq.nlargest(EXTREMES, (row for row in every if row.seconds > 0), key=lambda row: row.seconds),
        "truncated": heapq.nsmallest(EXTREMES, (row for row in every if row.outcome == "truncated"), key=lot),
        "failed": _of_each_kind([row for row in every if row.outcome == "failed"], lot),
    }
    found: dict[str, tuple[Row, list[str]]] = {}
    for why, some in by_why.items():
        for row in some if count else ():
            found.setdefault(row.row_key, (row, []))[1].append(why)
    return list(found.values())


def _of_each_kind(failed: Sequence[Row], lot: Callable[[Row], bytes]) -> list[Row]:
    """First one of each kind of error, then others."""
    kinds = defaultdict[str, list[Row]](list)
    for row in heapq.nsmallest(len(failed), failed, key=lot):
        kinds[row.kind].append(row)
    ordered = [some[turn] for turn in range(EXTREMES) for some in kinds.values() if turn < len(some)]
    return ordered[: max(EXTREMES, len(kinds))][: 3 * EXTREMES]


def tokenizer_of(run: Run, settings: Settings) -> Pieces | None:
    """That of target.path; unset, that of the producer's target.path where it is a folder of this node."""
    path = settings.target.path
    if not path:
        try:
            path = str(fleet.read(run.storage, run.name).get("target", {}).get("path") or "")
        except (RunMissing, RunNewer, CorruptFile):
            return None
        if not (path and Path(path).expanduser().is_dir()):
            return None
    try:
        return Pieces(tokens.load(path))
    except TargetError:
        if settings.target.path:
            raise
        return None


def records(
    run: Run, picked: Sequence[tuple[Row, list[str]]], pieces: Pieces | None, rows: Rows, *, step: Callable[[], object]
) -> list[JSON]:
    """What the page shows of each row, in the order of `picked`. A shard whose texts are damaged is added to `rows`."""
    by_batch = defaultdict[str, list[Row]](list)
    for row, _ in picked:
        by_batch[row.batch].append(row)
    found: dict[tuple[str, int], Sample] = {}
    dead = run.dead() if any(row.place < 0 for row, _ in picked) else {}
    for batch, some in by_batch.items():
        for row, sample in zip(some, _samples(run, batch, [row.place for row in some], dead, rows), strict=False):
            found[row.batch, row.place] = sample
        step()
    return [
        record(row, why, found[row.batch, row.place], pieces) for row, why in picked if (row.batch, row.place) in found
    ]


def _samples(run: Run, batch: str, places: Sequence[int], dead: dict[str, Sample], rows: Rows) -> list[Sample]:
    if places[0] < 0:
        return [dead[batch]] if batch in dead else []
    try:
        table = shards.table_in(run.read_shard("samples", batch)).take(places)
        return [sample_of(row) for row in table.to_pylist()]
    except shards.READ_FAULTS as error:
        rows.corrupt[batch] = f"its texts: {error}"
        return []


def record(row: Row, why: Sequence[str], sample: Sample, pieces: Pieces | None) -> JSON:
    """Of one row: plain JSON, bounded in size. The names are short: they stand in every row."""
    asked = {turn.message for turn in sample.turns}
    messages = [_message(message, at in asked) for at, message in enumerate(sample.messages)]
    left_out = max(0, len(messages) - MOST_MESSAGES)
    said: JSON = {
        "key": row.row_key,
        "batch": row.batch,
        "why": why,
        "outcome": row.outcome,
        "finish": row.finish_reason,
        "error": sample.error and _cut(sample.error)[0],
        "kind": row.kind,
        "source": row.source,
        "split": row.split,
        "thinking": row.thinking,
        "server": row.server,
        "worker": row.worker,
        "attempt": row.attempt,
        "start": row.start,
        "seconds": round(row.seconds, 3),
        "tokens": row.tokens,
        "prompt": row.prompt_tokens,
        "ids": row.ids_source,
        "mask": not_trained(row) or "",
        "drawn": sample.drawn or None,
        "messages": messages[left_out:],
        "left": left_out,
        "answer": _message(
            {
                "role": "assistant",
                "reasoning_content": sample.reasoning,
                "content": sample.content,
                "tool_calls": sample.tool_calls,
            },
            is_asked=True,
        )
        if row.outcome != "failed"
        else None,
    }
    if sample.token_ids or sample.prompt_token_ids:
        said["tok"] = _tokens(sample, pieces)
    return {name: value for name, value in said.items() if value not in (None, "", [])}


def not_trained(row: Row) -> str | None:
    """Why no token of a row is trained on; None where its answer is."""
    if row.outcome == "failed":
        return "it failed"
    if row.ids_source == "none":
        return "it has no ids"
    if not row.ids_match:
        return "its ids are not as many as the server counted"
    return "it is held out, to judge a drafter" if row.split == "heldout" else None


def _message(message: JSON, is_asked: bool) -> JSON:
    """`asked`: the target wrote it. `cut`: characters that are not shown."""
    content = message.get("content")
    if isinstance(content, list):
        content = "\n".join(str(part.get("text", part)) if isinstance(part, dict) else str(part) for part in content)
    calls = message.get("tool_calls")
    texts = {
        "text": content,
        "reasoning": message.get("reasoning_content"),
        "calls": shown_calls(calls) if calls else None,
    }
    said: JSON = {"role": str(message.get("role", "")), "asked": is_asked}
    for name, text in texts.items():
        if text:
            said[name], cut = _cut(str(text))
            said["cut"] = said.get("cut", 0) + cut
    return {name: value for name, value in said.items() if value not in (None, 0, False)}


def shown_calls(calls: Conversation) -> str:
    """`name(arguments)` a line."""
    found: list[str] = []
    for call in calls:
        function = call.get("function") or {}
        found.append(f"{function.get('name', '?')}({function.get('arguments', '')})")
    return "\n".join(found)


def _cut(text: str) -> tuple[str, int]:
    """At most MOST_CHARS of it, and how many are left out in the middle."""
    if len(text) <= MOST_CHARS:
        return text, 0
    cut = len(text) - MOST_CHARS
    head = text[: MOST_CHARS - TAIL_CHARS]
    return f"{head}\n\n[… {cut:,} characters are not shown …]\n\n{text[-TAIL_CHARS:]}", cut


def _tokens(sample: Sample, pieces: Pieces | None) -> JSON:
    """Ids of the prompt's end and of the answer, with the text of each where a tokenizer is there.

    `think` is how many tokens of the answer are its thought, the closing mark included.
    """
    prompt, answer = sample.prompt_token_ids, sample.token_ids
    shown = answer if len(answer) <= MOST_TOKENS + TAIL_TOKENS else [*answer[:MOST_TOKENS], *answer[-TAIL_TOKENS:]]
    said: JSON = {
        "p": prompt[-MOST_PROMPT_TOKENS:],
        "pn": len(prompt),
        "a": shown,
        "an": len(answer),
        "head": MOST_TOKENS if len(shown) < len(answer) else len(shown),
    }
    if pieces is not None:
        said["pt"] = pieces.of(said["p"])
        said["at"] = pieces.of(shown)
        said["think"] = _thought(said["at"], bool(sample.reasoning), len(shown))
    return said


def _thought(texts: Sequence[str], has_reasoning: bool, count: int) -> int:
    if not has_reasoning:
        return 0
    text = ""
    for number, piece in enumerate(texts):
        text = (text + piece)[-3 * len(CLOSE) - len(piece) :]
        if CLOSE in text:
            return number + 1
    return count
