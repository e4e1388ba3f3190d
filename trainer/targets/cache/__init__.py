"""The target whose hidden states are kept on a disk: captured once by another target, read in later epochs.

What is handed on has always passed through the form that is kept, also where it was captured just now: whether a row
was in the folder changes no number. The other target is loaded when the first row is missing.
"""

# T tokens, D hidden size of the target, K chosen layers, V vocabulary

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftfleet.errors import RunMissing
from draftfleet.logs import event
from draftfleet.runs import Run
from draftfleet.settings import Settings
from draftfleet.storage import open_storage
from trainer import targets
from trainer.devices import choose_dtype
from trainer.targets import Captured, Row, Target, check_ids, checked_layers, weights
from trainer.targets.cache.encoding import bytes_per_token, decode, encode
from trainer.targets.cache.estimate import check_room
from trainer.targets.cache.store import GB, Counts, Store
from trainer.targets.fingerprint import fingerprint
from trainer.targets.weights import Ends

log = logging.getLogger(__name__)

FOLDER = "hidden-states"
"""In the run's folder, unless cache.dir names another."""

Look = tuple[list[Row], list[Captured | None]]
"""A batch, and what was found of it."""


class CacheTarget:
    """Reads what `store` has, and has `open_source` capture the rest. `layers` are A ids; see trainer.targets."""

    def __init__(
        self, ends: Ends, layers: list[int], store: Store, open_source: Callable[[], Target], dtype: str
    ) -> None:
        self.path = ends.path
        self.layers = layers
        self.config: Any = ends.config
        self.embedding, self.head, self.norm_scale = ends.embedding, ends.head, ends.norm_scale
        self.device, self.dtype = ends.device, ends.dtype
        self.eos_token_ids = ends.eos_token_ids
        self.store = store
        self.logits = ends.logits
        self._dtype = dtype
        self._open_source = open_source
        self._source: Target | None = None
        self._epoch: int | None = None

    def capture(self, batches: Iterable[list[Row]]) -> Iterator[list[Captured]]:
        """Raises TargetError for ids outside the vocabulary, and what the other target raises."""
        looks = map(self._look, batches)
        for look in looks:
            found = [one for one in look[1] if one is not None]
            if len(found) < len(look[0]):
                yield from self._through_source(chain([look], looks))
                return
            yield found

    def _look(self, batch: list[Row]) -> Look:
        check_ids(batch, len(self.embedding), self.path)
        found: list[Captured | None] = []
        for row in batch:
            self._tell(row.epoch)
            kept = self.store.read(row.ids)
            self.store.counts.read += kept is not None
            found.append(None if kept is None else self._captured(row, kept))
        return batch, found

    def _through_source(self, looks: Iterable[Look]) -> Iterator[list[Captured]]:
        """The other target is asked for each batch, be it for no row of it, so that it may capture ahead in order."""
        if self._source is None:
            self._source = self._open_source()
        asked: deque[Look] = deque()

        def missing() -> Iterator[list[Row]]:
            for batch, found in looks:
                asked.append((batch, found))
                yield [row for row, one in zip(batch, found, strict=True) if one is None]

        for captured in self._source.capture(missing()):
            _, found = asked.popleft()
            rest = iter(captured)
            yield [one if one is not None else self._keep(next(rest)) for one in found]

    def _keep(self, one: Captured) -> Captured:
        width = one.last.shape[-1]
        states = torch.cat([one.hidden, one.last], -1).view(len(one.row.ids), -1, width)
        kept = encode(states, self._dtype)
        self.store.counts.captured += 1
        self.store.write(one.row.ids, kept)
        return self._captured(one.row, kept)

    def _captured(self, row: Row, kept: dict[str, Tensor]) -> Captured:
        states = decode({name: tensor.to(self.device) for name, tensor in kept.items()}, self.dtype)
        return Captured(row, states[:, :-1].flatten(1), states[:, -1])

    def _tell(self, epoch: int) -> None:
        """What became of the rows, once an epoch."""
        if self._epoch is not None and epoch != self._epoch:
            counts = asdict(self.store.counts)
            log.info(event("hidden states", epoch=self._epoch, **counts, gb=f"{self.store.used_bytes / GB:.3f}"))
            self.store.counts = Counts()
        self._epoch = epoch


def load(settings: Settings, layers: list[int] | None, device: torch.device) -> CacheTarget:
    """Raises TargetError, also if what the run has so far would exceed `cache.quota_gb` or the disk."""
    knobs = settings.cache
    ends = weights.load(settings.target.path, choose_dtype(settings.trainer.dtype, device), device)
    layers = checked_layers(layers, ends.num_layers)
    run = _run(settings)
    store = Store(
        Path(knobs.dir).expanduser() if knobs.dir or run is None else run.storage.local(f"{run.name}/{FOLDER}"),
        fingerprint(ends.path, knobs.source, str(ends.dtype)),
        layers,
        ends.config.hidden_size,
        knobs.dtype,
        quota_bytes=knobs.quota_gb * GB,
        min_free_bytes=settings.storage.min_free_gb * GB,
        about={
            "path": ends.path,
            "captured by": f"{knobs.source}, {ends.dtype}",
            "hidden_states of Hugging Face": [layer + 1 for layer in layers],
            "last": "after the last layer, before the final norm",
        },
    )
    if run is not None:
        per_token = bytes_per_token(knobs.dtype, len(layers) + 1, ends.config.hidden_size)
        check_room(store, run, settings, vocab_size=len(ends.embedding), bytes_per_token=per_token)
    captured_by = settings.model_copy(update={"trainer": settings.trainer.model_copy(update={"target": knobs.source})})
    return CacheTarget(ends, layers, store, lambda: targets.load(captured_by, layers, device), knobs.dtype)


def _run(settings: Settings) -> Run | None:
    """None if there is none and a folder was named: its rows come from elsewhere then."""
    try:
        return Run.open(open_storage(settings.storage), settings.run)
    except RunMissing:
        if settings.cache.dir:
            return None
        raise
