"""How much room the hidden states of a run need, before the first is kept."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

from draftfleet.errors import TargetError
from draftfleet.logs import event
from draftfleet.names import split_of
from draftfleet.runs import Run
from draftfleet.settings import Settings
from trainer.data import kept_rows
from trainer.targets.cache.store import GB, Store

log = logging.getLogger(__name__)

SHARDS_READ = 32
"""Tokens of a run with more shards are estimated from so many, evenly chosen."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """Of the rows that are there to be trained on, prompts included, after the cut to `trainer.max_length`."""

    tokens: int
    shards: int
    shards_read: int


def tokens_of(run: Run, settings: Settings, vocab_size: int) -> Tokens:
    done = [batch for batch in run.done() if split_of(batch) == "train"]
    chosen = done[:: max(1, math.ceil(len(done) / SHARDS_READ))]
    max_tokens = min(settings.trainer.max_length, settings.trainer.batch_tokens)
    count = num_read = 0
    for rows in kept_rows(run, chosen, max_tokens=max_tokens, vocab_size=vocab_size):
        num_read += 1
        count += sum(len(row.ids) for row in rows)
    return Tokens(count * len(done) // max(num_read, 1), len(done), num_read)


def check_room(store: Store, run: Run, settings: Settings, *, vocab_size: int, bytes_per_token: int) -> None:
    """Raises TargetError, with the numbers, if what there is now would not fit: nothing is kept then.

    A folder that this target and these layers have entries in was begun within its quota, and is gone on with: rows
    that have no room are captured in each epoch.
    """
    found = tokens_of(run, settings, vocab_size)
    needed, used, free = found.tokens * bytes_per_token, store.used_bytes, store.free_bytes
    is_begun = next(store.entries(), None) is not None
    log.info(
        event(
            "hidden states estimated", run=run.name, tokens=found.tokens, bytes_per_token=bytes_per_token,
            gb=f"{needed / GB:.3f}", used_gb=f"{used / GB:.3f}", quota_gb=f"{store.quota_bytes / GB:g}",
            free_gb=f"{free / GB:.3f}", shards=f"{found.shards_read}/{found.shards}", folder=store.folder,
        )
    )  # fmt: skip
    if is_begun:
        return
    numbers = (
        f"hidden states of the {found.tokens} tokens that run {run.name} has to train on so far take "
        f"{needed / GB:.3f} GB ({bytes_per_token} bytes a token as {settings.cache.dtype}, "
        f"{found.shards_read} of {found.shards} shards read)"
    )
    otherwise = (
        "set cache.dtype = float8, fewer trainer.layers, or trainer.target = "
        f"{settings.cache.source}, which captures in each epoch and keeps nothing."
    )
    if used + needed > store.quota_bytes:
        had = f", where {used / GB:.3f} GB lie already" if used else ""
        raise TargetError(
            f"{numbers}, and cache.quota_gb = {store.quota_bytes / GB:g} for {store.root}{had}: raise it if the disk "
            f"has the room ({free / GB:.1f} GB free), delete old entries, or {otherwise}"
        )
    if free - needed < store.min_free_bytes:
        raise TargetError(
            f"{numbers}, and the disk of {store.root} has {free / GB:.3f} GB free, of which storage.min_free_gb = "
            f"{store.min_free_bytes / GB:g} stay: set cache.dir to a larger disk, or {otherwise}"
        )
