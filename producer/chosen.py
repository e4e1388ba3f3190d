"""Which data sets the settings name, each with all that holds for it: its own knobs, its preset's, those of [producer].

A mixture is read by turns in `mixing.py`; what `data` means is found out in `sources/`.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from draftfleet import settings
from draftfleet.errors import SettingsError
from producer import presets

FROM_PRODUCER = (
    "column",
    "languages",
    "language_column",
    "min_prompt_chars",
    "max_prompt_chars",
    "min_prompt_tokens",
    "max_prompt_tokens",
    "keep",
    "drop",
    "match",
)
"""Knobs that hold for each source which does not set its own."""

OF_ONE = ("data", "preset", "split", "subset", "revision", "sample")
"""Knobs of [producer] that say nothing where there are several sources."""

FILTERS = FROM_PRODUCER[1:]


def chosen(knobs: settings.Producer) -> list[settings.Source]:
    """In the order of the settings, each with a name. Raises SettingsError, or DataError on an unknown preset."""
    if not knobs.sources:
        return [_whole(settings.Source(**{key: getattr(knobs, key) for key in settings.Rows.model_fields}), "producer")]
    given = [key for key in OF_ONE if getattr(knobs, key)]
    if given:
        raise SettingsError(
            f"producer.{given[0]} and producer.sources are both set: with several sources each has a {given[0]} of its "
            "own. Leave producer.sources out, or move it there."
        )
    weighted = [one.weight is not None for one in knobs.sources]
    if any(weighted) and not all(weighted):
        raise SettingsError(
            f"producer.sources[{weighted.index(False)}].weight is not set, and others are: set it on every source, or "
            "on none to have all of them read whole."
        )
    sources = [_whole(_with(one, knobs), f"producer.sources[{place}]") for place, one in enumerate(knobs.sources)]
    (name, times), *_ = Counter(one.name for one in sources).most_common(1)
    if times > 1:
        places = [f"producer.sources[{place}]" for place, one in enumerate(sources) if one.name == name]
        raise SettingsError(
            f"{' and '.join(places)} are both named {name}, and prompts say by name where they came from: give each a "
            "`name` of its own."
        )
    return sources


def counts_tokens(sources: list[settings.Source]) -> bool:
    """Whether prompts have to be rendered and tokenized to be chosen."""
    return any(one.min_prompt_tokens or one.max_prompt_tokens for one in sources)


def _with(source: settings.Source, knobs: settings.Producer) -> settings.Source:
    values: dict[str, Any] = {key: getattr(knobs, key) for key in FROM_PRODUCER if getattr(source, key) is None}
    return source.model_copy(update=values)


def _whole(source: settings.Source, place: str) -> settings.Source:
    """With what its preset says, and a name. `data` beside a preset is a copy of it, in the same columns."""
    if isinstance(source.data, str) and source.data.startswith(presets.PREFIX):
        if source.preset:
            raise SettingsError(f"{place}.data = {source.data} and {place}.preset are both set: leave one of them out.")
        source = source.model_copy(update={"preset": source.data.removeprefix(presets.PREFIX), "data": ""})
    if not source.data and not source.preset:
        raise SettingsError(
            f"{place}.data is not set: name files, a folder, a data set on the hub or a preset (preset:NAME)."
        )
    values: dict[str, Any] = {}
    if source.preset:
        preset = presets.find(source.preset)
        values = {"column": source.column or preset.column, "name": source.name or preset.name}
        if not source.data:
            values |= {"data": preset.hub, "split": source.split or preset.split}
            values |= {"subset": source.subset or preset.subset}
    return source.model_copy(update={"name": _name(source.data), **values} if not source.name else values)


def _name(data: str | list[str]) -> str:
    """Of a file its name up to the first dot; of a pattern its folder, where it has none; of the hub the whole."""
    first = data if isinstance(data, str) else (data or [""])[0]
    path = Path(first).expanduser()
    if not path.suffix and not path.exists() and first.count("/") == 1 and "*" not in first:
        return first
    stem = path.name.partition(".")[0].strip("*?-_")
    return stem or path.parent.name or "data"
