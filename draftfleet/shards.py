"""Prompt shards and sample shards as bytes: what a run puts into its storage, and what is read back of them."""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any, cast

import pyarrow as pa
import pyarrow.parquet as pq

from draftfleet.columns import SAMPLE_SCHEMA, row_of, sample_of
from draftfleet.outcomes import Counts
from draftfleet.records import Prompt, Sample, Turn, refuse_newer

READ_FAULTS = (pa.ArrowException, ValueError, TypeError, KeyError, EOFError, OSError)
"""What a damaged sample shard makes Arrow raise, or us."""

COUNTS, RUN_ID = b"draftfleet.counts", b"draftfleet.run_id"
"""Keys of the footer of a sample shard."""


def pack_prompts(prompts: Iterable[Prompt]) -> bytes:
    text = "".join(prompt.to_json() + "\n" for prompt in prompts)
    return gzip.compress(text.encode(), compresslevel=3, mtime=0)  # 9 takes twice as long to save a fourteenth


def prompts_in(raw: bytes) -> list[Prompt]:
    return [Prompt.from_json(line) for line in lines(gzip.decompress(raw).decode())]


def pack_samples(samples: list[Sample], counts: Counts, run_id: str) -> bytes:
    """Parquet with a checksum in every page, so that a shard that lost its line in the index still shows damage."""
    table = pa.Table.from_pylist([row_of(sample) for sample in samples], SAMPLE_SCHEMA)
    footer = {COUNTS: json.dumps(asdict(counts)), RUN_ID: run_id}
    sink = io.BytesIO()
    pq.write_table(table.replace_schema_metadata(footer), sink, compression="zstd", write_page_checksum=True)
    return sink.getvalue()


def table_in(raw: bytes) -> pa.Table:
    """All of it, every page held against its checksum. Shards of older versions have none."""
    return _file(raw, page_checksum_verification=True).read()


def samples_in(raw: bytes) -> list[Sample]:
    return [sample_of(cast(dict[str, Any], row)) for row in table_in(raw).to_pylist()]


def counts_in(raw: bytes) -> Counts:
    """What the footer says."""
    return Counts(**json.loads((_file(raw).metadata.metadata or {})[COUNTS]))


def outcomes_in(raw: bytes) -> dict[str, Counts]:
    """What became of each row, by row key; of its texts and ids only those of earlier turns are read."""
    return dict(counted(_read(raw, COUNTED)))


def columns_in(raw: bytes, names: Sequence[str]) -> list[dict[str, Any]]:
    """A few columns of each row. One that an older version did not write is missing."""
    return cast(list[dict[str, Any]], _read(raw, names).to_pylist())


def _read(raw: bytes, names: Sequence[str]) -> pa.Table:
    file = _file(raw)
    return file.read([name for name in names if name in file.schema_arrow.names])


def _file(raw: bytes, **how: Any) -> pq.ParquetFile:
    """Raises NewerFile by the footer's own statistics, before anything of a newer form is read."""
    file = pq.ParquetFile(io.BytesIO(raw), **how)
    names = file.schema_arrow.names
    for group in range(file.metadata.num_row_groups) if "schema_version" in names else ():
        groups = file.metadata.row_group(group)
        for number in range(groups.num_columns):
            column = groups.column(number)
            if column.path_in_schema == "schema_version" and column.statistics is not None:
                refuse_newer(column.statistics.max)
    return file


COUNTED = ("row_key", "outcome", "completion_tokens", "ids_match_usage", "turns", "ended")
"""Columns. The last two are not in shards of older versions."""


def counted(table: pa.Table) -> list[tuple[str, Counts]]:
    """The row key of each row, and what it counts for, as `Counts.of` counts samples."""
    table = table.select([name for name in COUNTED if name in table.column_names])
    return [
        (
            row["row_key"],
            Counts.one(
                row["outcome"],
                row["completion_tokens"],
                [Turn(**turn) for turn in row.get("turns") or ()],
                ids_match_usage=row["ids_match_usage"],
                is_cut_short=row.get("ended") is not None,
            ),
        )
        for row in cast(list[dict[str, Any]], table.to_pylist())
    ]


def lines(text: str) -> list[str]:
    """Not `splitlines`: that also breaks at U+2028 and its like, which JSON leaves inside a text."""
    return [line for line in text.split("\n") if line]
