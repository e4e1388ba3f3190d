"""What every table of the settings file is."""

from __future__ import annotations

from typing import get_args, get_origin

from pydantic import BaseModel, ConfigDict
from pydantic.fields import FieldInfo


class Section(BaseModel):
    """A table of the settings file."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


def table_of(field: FieldInfo) -> type[Section] | None:
    """What each entry is, of a knob that is a list of tables: `[[producer.sources]]` in the settings file."""
    (entry, *_) = get_args(field.annotation) or (None,)
    is_list = get_origin(field.annotation) is list
    return entry if is_list and isinstance(entry, type) and issubclass(entry, Section) else None
