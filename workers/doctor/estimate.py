"""How large a run will be: its samples, their tokens, their bytes. Where it is not known, it is not guessed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq

from draftfleet.names import is_again, parent_of
from workers.doctor.case import Case

BYTES_EACH, BYTES_PER_TOKEN = 350, 3.0
"""Of a sample in its shard, prompt tokens counted too: between the two that docs/operations.md measured."""

ENOUGH_SHARDS = 5
LOOKED_AT_BYTES = 1_000_000


@dataclass(frozen=True, slots=True)
class Estimate:
    """`low_bytes` is the least to be expected, `high_bytes` if each answer that was cut had gone on to its limit.

    `basis` says what it was computed from.
    """

    samples: int
    low_bytes: int
    high_bytes: int
    basis: str


def of(case: Case) -> Estimate | None:
    """Of what is still to be generated. None where nothing tells."""
    samples = num_samples(case)
    if samples is None:
        return None
    if (measured := _of_shards(case)) is not None:
        each, shards = measured
        size = int(samples * each)
        return Estimate(samples, size, size, f"{each:,.0f} bytes each in {shards} shards of the run")
    answers = [asked for asked in case.asked if asked.completion is not None and asked.completion.completion_tokens > 0]
    if not answers:
        return None
    low = high = prompt_tokens = 0
    for asked in answers:
        assert asked.completion is not None
        prompt_tokens += max(asked.completion.prompt_tokens, 0)
        low += asked.completion.completion_tokens
        high += case.max_tokens if asked.is_cut_by_us else asked.completion.completion_tokens
    sizes = [
        int(samples * (BYTES_EACH + BYTES_PER_TOKEN * (prompt_tokens + tokens) / len(answers)))
        for tokens in (low, high)
    ]
    basis = f"{low / len(answers):,.0f} to {high / len(answers):,.0f} tokens an answer, by the canary"
    return Estimate(samples, sizes[0], sizes[1], basis)


def num_samples(case: Case) -> int | None:
    """That are still to be generated. Batches are taken to be alike, and a row that was split off is one sample."""
    if case.run is not None and (sealed := case.run.sealed()) is not None:
        total = int(sealed.get("samples", sealed["prompts"]))
        each = total / max(sum(not is_again(name) for name in case.run.batches()), 1)
        return round(sum(each if parent_of(name)[1] is None else 1.0 for name in case.run.outstanding()))
    knobs = case.settings.producer
    counts = [_rows_in(path) for path in ([knobs.data] if isinstance(knobs.data, str) else knobs.data)]
    if knobs.sources or not counts or any(count is None for count in counts):
        return None
    rows = min([sum(count or 0 for count in counts), *(most for most in (knobs.limit, knobs.sample) if most)])
    return rows * case.sampling.n


def num_batches(case: Case) -> int | None:
    samples = num_samples(case)
    return None if samples is None else -(-samples // case.settings.producer.batch_size)


def _rows_in(data: str) -> int | None:
    """Of a plain file: exactly for Parquet, by the length of its first lines for JSON lines."""
    path = Path(data).expanduser() if data else None
    if path is None or not path.is_file():
        return None
    if path.name.endswith(".parquet"):
        return int(pq.read_metadata(path).num_rows)
    if not path.name.endswith((".jsonl", ".json", ".ndjson")):
        return None
    with path.open("rb") as file:
        start = file.read(LOOKED_AT_BYTES)
    lines = start.count(b"\n") + (1 if start and not start.endswith(b"\n") else 0)
    return round(lines * path.stat().st_size / len(start)) if start else 0


def _of_shards(case: Case) -> tuple[float, int] | None:
    """Bytes of a sample, measured on the run's newest shards."""
    if case.run is None:
        return None
    sizes = dict(list(case.run.done_bytes().items())[-ENOUGH_SHARDS:])
    rows = sum(case.run.counts(batch).rows for batch in sizes)
    return (sum(sizes.values()) / rows, len(sizes)) if rows else None


def shown(size: float) -> str:
    """`5.7 GB`."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if abs(size) < 1000:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:,.1f} TB"
