"""What `produce` would do, before it does it: `draftfleet produce --dry-run`. Nothing is written anywhere."""

from __future__ import annotations

from draftfleet.records import Prompt
from draftfleet.settings import Settings
from producer.lengths import token_counter
from producer.reading import Reading
from producer.sources import open_source


def first_prompts(settings: Settings, count: int) -> list[Prompt]:
    """The first distinct prompts of the data set, fewer where it has fewer. Raises SettingsError or DataError."""
    found: dict[str, Prompt] = {}
    if count > 0:
        for prompt in opened(settings):
            found.setdefault(prompt.prompt_id, prompt)
            if len(found) == count:
                break
    return list(found.values())


def opened(settings: Settings) -> Reading:
    """The data set as `produce` reads it. Raises SettingsError or DataError."""
    count_tokens = token_counter(settings)
    return Reading(open_source(settings.producer), settings.producer, count_tokens)
