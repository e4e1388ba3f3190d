"""Conversations of which every assistant turn is asked: where their turns stand, and how what is left is asked again.

A sample holds the conversation up to the turn that was asked last. What came after it in the source stands in the
prompt shard alone, so who asks a conversation again takes it from there.
"""

from __future__ import annotations

from dataclasses import replace

from draftfleet.errors import CorruptFile
from draftfleet.names import parent_of
from draftfleet.records import Conversation, Prompt, Sample
from draftfleet.runs import Run


def asks_every_turn(run: Run) -> bool:
    """Whether the run pins producer.turns = "all"."""
    return run.info.content.get("producer.turns") == "all"


def answers(messages: Conversation) -> list[range]:
    """Where the assistant's turns stand. Consecutive messages are one turn.

    What an assistant says before the first user turn is no answer: it is left as it is.
    """
    found: list[range] = []
    has_user = False
    for number, message in enumerate(messages):
        if message["role"] == "assistant" and has_user:
            if found and found[-1].stop == number:
                found[-1] = range(found[-1].start, number + 1)
            else:
                found.append(range(number, number + 1))
        has_user = has_user or message["role"] == "user"
    return found


def merged(source: Prompt, sample: Sample) -> Prompt:
    """The source with the turns that are finished in place of its own: what is asked where a sample is asked again."""
    left = answers(source.messages)[len(sample.turns) :]
    rest = source.messages[left[0].start :] if left else []
    return replace(source, messages=[*sample.messages, *rest], turns=sample.turns, unfinished=None)


class Sources:
    """The prompts behind samples. Each prompt shard is read once."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._read: dict[str, dict[str, Prompt]] = {}

    def prompt(self, sample: Sample) -> Prompt:
        """What the row of a sample is asked again with. Raises CorruptFile."""
        if not asks_every_turn(self._run):
            return Prompt(sample.prompt_id, sample.split, sample.messages, sample.tools, sample.sample, sample.turns)
        batch = parent_of(sample.batch)[0]
        try:
            if batch not in self._read:
                self._read[batch] = {prompt.row_key: prompt for prompt in self._run.read_prompts(batch)}
            return merged(self._read[batch][sample.row_key], sample)
        except (FileNotFoundError, KeyError) as error:
            raise CorruptFile(
                f"conversation {sample.row_key} is not in the prompts of batch {batch} any more ({error}): without its "
                "source it cannot be asked again. Restore the prompt shard from a copy."
            ) from None
