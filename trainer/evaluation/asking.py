"""Who is asked: the held-out prompts of a run, every turn of a conversation a prompt of its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from draftfleet import drawing, tokens
from draftfleet.conversations import asks_every_turn, next_turn
from draftfleet.names import is_again, split_of
from draftfleet.outcomes import best
from draftfleet.records import Prompt, Sample
from draftfleet.runs import Run
from draftfleet.settings import Settings
from draftfleet.training_rows import rows_of


@dataclass(frozen=True, slots=True)
class Asked:
    """What the target reads before it answers. `conversation` is the key of the sample; `turn` counts from 0."""

    ids: list[int]
    conversation: str = ""
    turn: int = 0
    source: str = ""


def asked(run: Run, settings: Settings) -> Iterator[Asked]:
    """The first `evaluation.prompts` held-out conversations: of each finished turn the ids that were served; where none
    is, its first turn, rendered by the target's tokenizer with the tools of the row and the switches that the run pins.
    """
    left = settings.evaluation.prompts
    batches = [batch for batch in run.batches() if split_of(batch) == "heldout"]
    again = [
        sample for batch in batches if is_again(batch) and run.is_done(batch) for sample in run.read_samples(batch)
    ]
    for batch in batches:
        if is_again(batch) or left == 0:  # its prompts are those of other batches
            continue
        samples = best([*(run.read_samples(batch) if run.is_done(batch) else []), *again])
        for prompt in [prompt for prompt in run.read_prompts(batch) if prompt.sample == 0][:left]:
            sample = samples.get(prompt.row_key)
            turns = [] if sample is None else _served(sample)
            source = prompt.source or (sample.source if sample else "")
            for number, ids in turns or [(0, _render(run, settings, prompt))]:
                yield Asked(ids, prompt.row_key, number, source)
            left -= 1


def _served(sample: Sample) -> list[tuple[int, list[int]]]:
    """Of each turn its number and the ids of its prompt."""
    turns = [(row.turn, row.prompt_token_ids) for row in rows_of(sample)]
    if sample.outcome == "failed":  # no answer, but it was asked
        turns.append((len(sample.turns), sample.prompt_token_ids))
    return [(number, ids) for number, ids in turns if ids]


def _render(run: Run, settings: Settings, prompt: Prompt) -> list[int]:
    first = next_turn(prompt) if asks_every_turn(run) else prompt
    pinned = drawing.asked(run) if "sampling.thinking" in run.info.content else settings.sampling
    sampling, _ = drawing.drawn(pinned, prompt.row_key)
    return tokens.load(settings.target.path).prompt_ids(
        first.messages, prompt.tools, sampling.thinking, sampling.template_kwargs
    )
