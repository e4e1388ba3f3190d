"""Whether samples are the target's: decoded with its tokenizer, their ids must spell their text.

Ids of another tokenizer are numbers like any other. A drafter would be trained on them without a complaint, on noise.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from draftfleet import tokens
from draftfleet.errors import TargetError
from draftfleet.logs import event
from draftfleet.records import Sample

log = logging.getLogger(__name__)

NUM_SAMPLES = 32


class Spelling:
    """Looks at the first samples that have a text, and then no more."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._is_known = False

    def check(self, samples: Sequence[Sample]) -> None:
        """Raises TargetError if the ids of not one of them spell its text."""
        told = [sample for sample in samples if sample.outcome == "ok" and sample.token_ids and sample.content]
        if self._is_known or not told:
            return
        self._is_known = True
        try:
            tokenizer = tokens.load(self._path)
        except TargetError as error:  # training itself needs none
            log.warning(event("spelling of samples not checked", error=error))
            return
        looked_at = told[:NUM_SAMPLES]
        if not any((sample.content or "").strip() in tokenizer.decode(sample.token_ids) for sample in looked_at):
            raise TargetError(
                f"the token ids of {len(looked_at)} samples do not spell their text with the tokenizer of target.path "
                f"= {self._path}, sample {looked_at[0].row_key} for one: they were made by another model. Name the "
                "folder of the model that the servers served."
            )
