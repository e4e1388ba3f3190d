"""Whether a run that was begun asks the same prompts in the same way: only then `draftfleet generate` goes on with it.

`draftfleet produce` adds whatever data set it is given; a folder of `generate` holds the answers to one.
"""

from __future__ import annotations

from typing import Any

from draftfleet.errors import RunConflict, RunMissing
from draftfleet.runs import Run
from draftfleet.settings import Settings
from draftfleet.storage import open_storage
from producer.produce import UNPINNED, content_of
from producer.sources import Source, open_source


def refuse_other(settings: Settings, *, adds: bool) -> None:
    """Raises RunConflict, naming what differs; with `adds` the prompts may. Or DataError, where they cannot be read."""
    try:
        run = Run.open(open_storage(settings.storage), settings.run)
    except RunMissing:
        return
    content = content_of(settings)
    if None in (
        content["target.fingerprint"],
        run.info.content.get("target.fingerprint"),
    ):  # there is nothing to compare
        content["target.fingerprint"] = run.info.content.get("target.fingerprint")
    where = f"{settings.storage.url} was begun"
    if differences := run.info.differences(content, UNPINNED):
        raise RunConflict(
            f"{where} with other settings:\n" + "\n".join(differences) + "\n"
            "Answers in one folder must be comparable: give the same flags as before, or another --out."
        )
    if not adds and (other := _other_prompts(run, open_source(settings.producer))):
        raise RunConflict(
            f"{where} with other prompts:\n{other}\nGive another --out for these, or --add-prompts to have them asked, "
            "too: what is answered is not asked again."
        )


def _other_prompts(run: Run, source: Source) -> str:
    """What differs; empty where nothing does, or where nothing tells (files above 8 GiB, a pipe)."""
    before = [run.info.provenance.get("data.source"), (run.sealed() or {}).get("last_source")]
    known = [facts for facts in before if facts]
    now = _content(source.provenance)
    if not now or not known or any(_content(facts) in (None, now) for facts in known):
        return ""
    return f"  the folder has {_shown(known[-1])}\n  now       {_shown(source.provenance)}"


def _content(facts: dict[str, Any]) -> Any:
    """What tells the content of a data set, without where it lies; None where it is not known."""
    if parts := facts.get("files") or facts.get("sources"):
        contents = [_content(part) for part in parts]
        return None if None in contents else contents
    on_the_hub = [facts.get(name) for name in ("name", "subset", "split", "commit")]
    return facts.get("sha256") or (on_the_hub if facts.get("commit") else None)


def _shown(facts: dict[str, Any]) -> str:
    if parts := facts.get("files") or facts.get("sources"):
        return f"{len(parts)} files, {', '.join(map(_shown, parts[:3]))}"
    name = facts.get("path") or facts.get("name") or facts["kind"]
    size = f", {facts['size_bytes']:,} bytes" if "size_bytes" in facts else ""
    digest = facts.get("sha256") or facts.get("commit")
    return f"{name}{size}" + (f", sha256 or commit {digest[:12]}" if digest else "")
