"""What both servers are asked: the run's held-out prompts, or those of a file."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from draftfleet import drawing
from draftfleet.conversations import next_turn
from draftfleet.errors import DataError, RunMissing
from draftfleet.names import is_again, split_of
from draftfleet.records import Prompt
from draftfleet.runs import Run
from draftfleet.settings import Settings
from draftfleet.storage import open_storage
from workers.bench.sides import Question

FirstPrompts = Callable[[Settings, int], list[Prompt]]
"""The first prompts of `producer.data`. May raise DataError or SettingsError."""


def run_of(settings: Settings) -> Run | None:
    """None where there is none of that name."""
    try:
        return Run.open(open_storage(settings.storage), settings.run)
    except RunMissing:
        return None


def questions(
    settings: Settings,
    run: Run | None,
    file: str | None,
    first_prompts: FirstPrompts,
    *,
    count: int,
    max_tokens: int,
    temperature: float,
) -> list[Question]:
    """The first `count` distinct ones, each with what the run would ask it with but for length and temperature.

    Raises DataError where there are none.
    """
    if file is not None:
        knobs = settings.producer.model_copy(update={"data": file, "sources": [], "preset": None})
        prompts = first_prompts(settings.model_copy(update={"producer": knobs}), count)
    elif run is None:
        raise DataError(
            f"there is no run {settings.run} in {settings.storage.url} whose held-out prompts could be asked: name a "
            "file of prompts with --prompts, or another run with --run."
        )
    else:
        prompts = [prompt for _, prompt in zip(range(count), _held_out(run), strict=False)]
    if not prompts:
        where = file or f"run {settings.run}"
        raise DataError(
            f"{where} has no {'' if file else 'held-out '}prompts: "
            + (
                "name another file."
                if file
                else "name a file with --prompts, or produce with producer.heldout above 0."
            )
        )
    asked = settings.sampling if run is None else drawing.asked(run)
    change = {"max_tokens": max_tokens, "temperature": temperature}
    return [
        Question(next_turn(prompt), drawing.drawn(asked, prompt.row_key)[0].model_copy(update=change))
        for prompt in prompts
    ]


def _held_out(run: Run) -> Iterator[Prompt]:
    """One row of each prompt, in the order of `draftfleet evaluate`."""
    for batch in run.batches():
        if split_of(batch) == "heldout" and not is_again(batch):
            yield from (prompt for prompt in run.read_prompts(batch) if prompt.sample == 0)
