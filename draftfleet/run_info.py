"""run.json: what a run pins, and where it came from."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self

import draftfleet
from draftfleet.errors import RunNewer
from draftfleet.records import SCHEMA_VERSION, is_newer
from draftfleet.storage import Storage


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """`content` is pinned: a resume with other content is refused. `provenance` says where it came from."""

    run: str
    run_id: str
    schema_version: int
    product_version: str
    created_at: float
    content: dict[str, Any]
    provenance: dict[str, Any] = field(default_factory=dict[str, Any])

    @classmethod
    def new(cls, name: str, content: dict[str, Any], provenance: dict[str, Any]) -> Self:
        """Of a run that begins now, under an id of its own."""
        return cls(
            run=name,
            run_id=uuid.uuid4().hex,
            schema_version=SCHEMA_VERSION,
            product_version=draftfleet.__version__,
            created_at=time.time(),
            content=content,
            provenance=provenance,
        )

    def differences(self, content: dict[str, Any], unpinned: Mapping[str, Any]) -> list[str]:
        """A line for each key in which other content differs.

        `unpinned` says what holds for a key that is not there: an older version made the run, and knew no such knob.
        """
        pairs = {
            key: (self.content.get(key, unpinned.get(key)), content.get(key, unpinned.get(key)))
            for key in sorted(self.content.keys() | content.keys())
        }
        return [f"  {key}: the run has {has!r}, now {now!r}" for key, (has, now) in pairs.items() if has != now]

    def to_json(self) -> bytes:
        return (json.dumps(asdict(self), indent=2, ensure_ascii=False) + "\n").encode()

    @classmethod
    def from_json(cls, raw: bytes) -> Self:
        """Raises RunNewer, ValueError or TypeError."""
        fields = json.loads(raw)
        version = fields.get("schema_version") if isinstance(fields, dict) else None
        if is_newer(version):
            raise RunNewer(
                f"run {fields.get('run')} is of schema version {version}, made by draftfleet "
                f"{fields.get('product_version')}; this is draftfleet {draftfleet.__version__}, which reads up to "
                f"version {SCHEMA_VERSION}. Upgrade it; nothing of the run was touched.",
                version,
            )
        return cls(**fields)


def is_gone(storage: Storage, name: str, run_id: str) -> bool:
    """Whether the run was deleted, also where another one has its name by now. Raises StorageError."""
    try:
        return run_id.encode() not in storage.read(f"{name}/run.json")
    except FileNotFoundError:
        return True
