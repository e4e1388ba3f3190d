"""What is shown of a prompt is what the model will see, to the character."""

from __future__ import annotations

from typing import Any

from draftfleet.records import Conversation, Prompt, prompt_id
from draftfleet.settings import Sampling
from draftfleet.tokens import TargetTokenizer
from producer.preview.masks import Picks, shown
from producer.preview.survey import answers

CALL: dict[str, Any] = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
MESSAGES: Conversation = [
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "Add."},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "2"},
    {"role": "assistant", "content": "It is "},
    {"role": "assistant", "content": "2."},
    {"role": "user", "content": "Thanks."},
]
TURNS: Conversation = [
    {"role": "user", "content": "Name a prime."},
    {"role": "assistant", "content": "7"},
    {"role": "user", "content": "A larger one."},
    {"role": "assistant", "content": "11"},
    {"role": "user", "content": "Again."},
]


def prompt(messages: Conversation, tools: list[dict[str, Any]] | None = None) -> Prompt:
    return Prompt(prompt_id(messages, tools), "train", messages, tools)


def test_answers_are_the_assistants_turns_after_a_user_has_spoken() -> None:
    assert answers(MESSAGES) == [range(2, 3), range(4, 6)]
    assert answers(TURNS) == [range(1, 2), range(3, 4)]
    assert answers(TURNS[:1]) == []


def test_the_text_of_the_last_turn_has_the_ids_that_are_asked(tokenizer: TargetTokenizer) -> None:
    for thinking in (None, False):
        found = shown(prompt(TURNS), tokenizer, Sampling(thinking=thinking), every_turn=False)

        [ask] = found.asks
        ids = tokenizer.prompt_ids(TURNS, None, thinking)
        assert tokenizer.encode(ask.prompt) == ids
        assert (found.tokens, ask.completion, ask.end) == (len(ids), "", "<|im_end|>")


def test_each_turn_is_shown_with_its_own_prompt_and_the_answer_that_is_trained(tokenizer: TargetTokenizer) -> None:
    found = shown(prompt(TURNS), tokenizer, Sampling(), every_turn=True)

    assert [(ask.number, ask.of, ask.completion) for ask in found.asks] == [(1, 3, "7"), (2, 3, "11"), (3, 3, "")]
    above = ""
    for ask, end in zip(found.asks, (1, 3, 5), strict=True):
        text = above + ask.prompt if ask.follows else ask.prompt
        assert text == tokenizer.prompt_text(TURNS[:end])
        above = text + ask.completion + ask.end
    assert [ask.follows for ask in found.asks] == [False, True, True]


def test_a_template_that_rewrites_earlier_turns_has_each_of_them_shown_in_full(tokenizer: TargetTokenizer) -> None:
    told = [{**message, "reasoning_content": "Hm."} if message["role"] == "assistant" else message for message in TURNS]

    found = shown(prompt(told), tokenizer, Sampling(), every_turn=True)

    assert [ask.follows for ask in found.asks] == [False, False, False]
    assert [ask.prompt for ask in found.asks] == [tokenizer.prompt_text(told[:end]) for end in (1, 3, 5)]
    assert found.asks[0].completion == "<think>\nHm.\n</think>\n\n7"


def test_tool_calls_of_the_source_stand_where_the_answer_will(tokenizer: TargetTokenizer) -> None:
    tools = [{"type": "function", "function": {"name": "add"}}]

    found = shown(prompt(MESSAGES, tools), tokenizer, Sampling(), every_turn=True)

    assert found.asks[0].completion.startswith('tool calls: [{"id": "c1"')
    assert found.asks[1].completion == "It is \n2."
    assert (found.tools, found.tools_unseen) == (1, True)  # the tiny target's template knows no tools


def test_a_prompt_that_has_its_thought_opened_says_so(tokenizer: TargetTokenizer) -> None:
    opened = [{"role": "user", "content": "<think>"}]

    assert not shown(prompt(opened), tokenizer, Sampling(), every_turn=False).asks[0].in_thought
    tokenizer = _Opening(tokenizer)
    assert shown(prompt(opened), tokenizer, Sampling(), every_turn=False).asks[0].in_thought


class _Opening(TargetTokenizer):
    """Of a target whose template opens the thought itself."""

    def __init__(self, tokenizer: TargetTokenizer) -> None:
        super().__init__(tokenizer.path, tokenizer._tokenizer)

    def _render(self, *args: Any, **kwargs: Any) -> str:
        return super()._render(*args, **kwargs) + "<think>\n"


def test_without_a_tokenizer_roles_and_texts_are_shown() -> None:
    found = shown(prompt(TURNS), None, Sampling(), every_turn=True)

    assert [(ask.prompt, ask.completion) for ask in found.asks] == [
        ("[user] Name a prime.\n", "7"),
        ("[user] A larger one.\n", "11"),
        ("[user] Again.\n", ""),
    ]
    assert not found.rendered


def test_the_prompts_that_are_shown_are_the_first_and_the_first_of_each_kind() -> None:
    plain = [prompt([{"role": "user", "content": str(number)}]) for number in range(9)]
    turns, tooled = prompt(TURNS), prompt(TURNS[:1], [{"type": "function"}])

    for most, wanted in (
        (0, []),
        (1, plain[:1]),
        (3, [plain[0], turns, tooled]),
        (4, [plain[0], turns, tooled, plain[1]]),
    ):
        picks = Picks(most)
        for one in [*plain, turns, tooled]:
            picks.add(one)
        assert picks.chosen() == wanted
