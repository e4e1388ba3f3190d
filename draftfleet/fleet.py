"""fleet.json: what all workers of a run should agree on. The producer writes it, `draftfleet join` reads it.

It is the lowest layer of the joining node's settings: file, environment and flags win over it. Secrets are not in it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit, urlunsplit

from draftfleet.errors import CorruptFile, RunMissing
from draftfleet.runs import Run
from draftfleet.settings import Settings, load
from draftfleet.storage import Storage, open_storage

Sections = dict[str, dict[str, Any]]


def describe(run: Run, settings: Settings) -> None:
    """Put what this producer's settings say. May raise StorageError."""
    sections: Sections = {
        "target": {"model": settings.model, "path": settings.target.path},
        "producer": {"batch_size": settings.producer.batch_size},
        "claims": settings.claims.model_dump(mode="json"),
    }
    if settings.queue.url is not None:
        sections["queue"] = {"url": without_secret(settings.queue.url.get_secret_value())}
    run.storage.put(_path(run.name), (json.dumps(sections, indent=2) + "\n").encode())


def without_secret(url: str) -> str:
    """The address with its user, if it has one, and without the password."""
    parts = urlsplit(url)
    user = parts.username or ""
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit(parts._replace(netloc=f"{user}@{host}" if user else host))


def read(storage: Storage, name: str) -> Sections:
    """Raises RunMissing or CorruptFile."""
    Run.open(storage, name)
    try:
        found = json.loads(storage.read(_path(name)))
    except FileNotFoundError:
        raise RunMissing(
            f"run {name} in {storage.url} has no fleet.json: an older version made it. `draftfleet produce` writes it, "
            "also where there is nothing new to add; or start `draftfleet work` with the settings of the other nodes."
        ) from None
    except ValueError as error:
        raise CorruptFile(
            f"{storage.url}/{_path(name)} cannot be read: {error}. `draftfleet produce` mends it."
        ) from None
    return _usable(cast(Sections, found))


def _usable(sections: Sections) -> Sections:
    """Without a folder of the target that is not on this node: its worker then takes the servers' own token ids."""
    path = str(sections.get("target", {}).get("path", ""))
    if path.startswith(("/", "./", "../", "~")) and not Path(path).expanduser().exists():
        print(f"left out: target.path = {path} is not on this node; give it with --target", file=sys.stderr)
        return sections | {"target": sections["target"] | {"path": ""}}
    return sections


def join(config: Path | None, flags: dict[str, Any]) -> Settings:
    """The settings of a node that joins: those that `config`, environment and `flags` leave open come from the run."""
    own = load(config, flags)
    sections = read(open_storage(own.storage), own.run)
    settings = load(config, flags, below=sections)
    for section, values in sections.items():
        given = getattr(own, section).model_fields_set
        for key, value in values.items():
            if key not in given and value != "":
                print(f"from run {own.run}: {section}.{key} = {value}", file=sys.stderr)
    return settings


def _path(name: str) -> str:
    return f"{name}/fleet.json"
