"""The target in serving vLLM engines: they run it, on as many GPUs as it takes, and hand out hidden states as files.

Rows are asked for in order, as far ahead as the spool has room, and their files are deleted as they are read.
Embedding, head and final norm come from `target.path`; its decoder layers are not loaded.
"""

# T tokens, n layers asked for, K chosen layers, D hidden size of the target

from __future__ import annotations

import hashlib
import logging
import os
import queue
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftfleet.errors import Mismatch, SettingsError, TargetError
from draftfleet.logs import event
from draftfleet.settings import Settings
from trainer.devices import choose_dtype
from trainer.targets import Captured, Row, check_ids, checked_layers, weights
from trainer.targets.vllm import states
from trainer.targets.vllm.asking import Asked, Asking
from trainer.targets.vllm.command import engine_layers, longest_row
from trainer.targets.vllm.examining import Examiner
from trainer.targets.vllm.servers import Servers
from trainer.targets.vllm.spool import Spool
from trainer.targets.weights import Ends

log = logging.getLogger(__name__)

GB = 1e9

END_S = 2.0
"""How long the iterator of batches may take to end once nobody wants more of it."""

MANY_REFUSED = 10
"""More than this many rows refused, and more than a tenth of all: it is not the rows."""


class VllmTarget:
    """A frozen target that others run. `layers` are A ids; see trainer.targets."""

    def __init__(self, settings: Settings, ends: Ends, layers: list[int], spool: Spool, size: int) -> None:
        self.path = settings.target.path
        self.layers = layers
        self.config: Any = ends.config
        self.embedding, self.head, self.norm_scale = ends.embedding, ends.head, ends.norm_scale
        self.logits = ends.logits
        self.device, self.dtype = ends.embedding.device, ends.embedding.dtype
        self.eos_token_ids = ends.eos_token_ids
        self._settings, self._spool, self._size = settings, spool, size
        asked_for = engine_layers(layers, ends.num_layers)
        self._chosen = [asked_for.index(layer + 1) for layer in layers]
        self._examiner = Examiner(settings, ends, spool, asked_for)
        self._examiner.examine_all()
        self._expect_room()
        self._num_asked = self._num_refused = 0

    def capture(self, batches: Iterable[list[Row]]) -> Iterator[list[Captured]]:
        """Batch for batch in order. `batches` is drawn by a thread, as far ahead as the spool has room.

        A row that every server refuses comes shortened, with nothing of it trained on. Raises TargetError.
        """
        servers = Servers(self._settings.capture, self._size)
        asking = Asking(self._settings.capture, servers, self._spool, self._examiner)
        drawn: queue.SimpleQueue[list[Asked] | Exception | None] = queue.SimpleQueue()
        drawing = threading.Thread(target=self._draw, args=(batches, asking, drawn), name="capture-draw", daemon=True)
        drawing.start()
        try:
            while (batch := drawn.get()) is not None:
                if isinstance(batch, Exception):
                    raise batch
                yield [self._take(one, asking) for one in batch]
        finally:
            asking.close()
            drawing.join(END_S)

    def _draw(self, batches: Iterable[list[Row]], asking: Asking, drawn: queue.SimpleQueue[Any]) -> None:
        """Ask for rows as they come. It may wait for the next batch while those before it are trained on."""
        try:
            for rows in batches:
                check_ids(rows, len(self.embedding), self.path)
                batch = [Asked(row, self._num_bytes(row)) for row in rows]
                drawn.put(batch)
                if not all(asking.ask(one) for one in batch):
                    return
        except Exception as error:  # of the caller's iterator, raised where the caller waits
            drawn.put(error)
        else:
            drawn.put(None)

    def _take(self, one: Asked, asking: Asking) -> Captured:
        """Wait for a row, read it, and delete its file."""
        self._num_asked += 1
        while (file := one.answer.result()) is not None:
            try:
                found = self._captured(one.row, states.read(file))
            except Mismatch as error:
                self._spool.remove(file)
                asking.ask_again(one, error)
            else:
                asking.done(one)
                return found
        asking.done(one)
        return self._without_loss(one)

    def _captured(self, row: Row, read: Tensor) -> Captured:
        """From (T, n, D) as the engine orders them."""
        hidden = read[:, self._chosen].flatten(1).to(self.device, self.dtype)
        return Captured(row, hidden, read[:, -1].clone().to(self.device, self.dtype))

    def _without_loss(self, one: Asked) -> Captured:
        self._num_refused += 1
        said = f"the servers refuse row {one.row.key} of {len(one.row.ids)} tokens: {one.refused}"
        if self._num_refused > MANY_REFUSED and 10 * self._num_refused > self._num_asked:
            raise TargetError(
                f"{said}. It is the {self._num_refused}th of {self._num_asked} rows. Serve the target with a "
                f"--max-model-len above {longest_row(self._settings)}, or lower trainer.max_length."
            )
        log.error(event("row not trained on", row=one.row.key, error=said))
        ids = one.row.ids[:4]
        width = len(self.embedding[0])
        return Captured(
            Row(one.row.key, ids, torch.zeros(len(ids), dtype=torch.bool), one.row.epoch),
            torch.zeros(len(ids), len(self.layers) * width, device=self.device, dtype=self.dtype),
            torch.zeros(len(ids), width, device=self.device, dtype=self.dtype),
        )

    def _num_bytes(self, row: Row) -> int:
        num_bytes = self._examiner.form.num_bytes(len(row.ids))
        if num_bytes > self._spool.limit_bytes:
            raise TargetError(self._too_small(num_bytes, len(row.ids)))
        return num_bytes

    def _expect_room(self) -> None:
        longest = longest_row(self._settings)
        if (num_bytes := self._examiner.form.num_bytes(longest)) > self._spool.limit_bytes:
            raise TargetError(self._too_small(num_bytes, longest))
        spool_gb, free_gb = self._settings.capture.spool_gb, self._spool.free_bytes() / GB
        if free_gb < spool_gb:
            raise TargetError(
                f"capture.spool_gb = {spool_gb:g}, and {self._spool.folder} has {free_gb:.2f} GB free: make room, "
                "lower capture.spool_gb, or take another capture.folder (in a container, --shm-size bounds /dev/shm)."
            )

    def _too_small(self, num_bytes: int, num_tokens: int) -> str:
        share = f", of which each of {self._size} processes has its part" if self._size > 1 else ""
        return (
            f"the states of a row of {num_tokens} tokens take {num_bytes / GB:.3g} GB, and capture.spool_gb = "
            f"{self._settings.capture.spool_gb:g}{share}: raise it, or lower trainer.max_length."
        )


def load(settings: Settings, layers: list[int] | None, device: torch.device) -> VllmTarget:
    """The ends of `target.path` in `trainer.dtype`, and the servers of `capture.servers`.

    Removes what an earlier training of this drafter left in the spool. Raises TargetError or SettingsError.
    """
    ends = weights.load(settings.target.path, choose_dtype(settings.trainer.dtype, device), device)
    checked = checked_layers(layers, ends.num_layers)
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    spool = Spool(
        _folder(settings.capture.folder),
        int(settings.capture.spool_gb * GB / size),
        mark=_mark(settings),
        rank=rank,
        size=size,
    )
    if removed := spool.sweep():
        log.info(event("leftovers removed", folder=spool.folder, files=removed))
    return VllmTarget(settings, ends, checked, spool, size)


def _folder(name: str) -> Path:
    if not name:
        raise SettingsError(
            "trainer.target = vllm and capture.folder is not set: name the folder that the servers write to and this "
            "node reads, best one in memory, such as /dev/shm/draftfleet."
        )
    folder = Path(name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".draftfleet-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise TargetError(
            f"capture.folder = {name} cannot be written to: {error}. Files are deleted there as they are read."
        ) from None
    return folder


def _mark(settings: Settings) -> str:
    """Twelve hexadecimal digits of one drafter."""
    name = "\n".join((settings.storage.url, settings.run, settings.trainer.drafter))
    return hashlib.sha256(name.encode()).hexdigest()[:12]
