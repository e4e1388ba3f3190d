"""The target's tokenizer, against ids worked out by hand and against the ids that an engine really produced."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from draftfleet.errors import TargetError
from draftfleet.tokens import TargetTokenizer, context_tokens, load

TINY_TARGET = Path(__file__).parents[2] / "examples/tiny-target"
SUM = [{"role": "user", "content": "What is 3 + 4?"}]
SUM_IDS = [1, 302, 201, 555, 289, 223, 21, 351, 223, 22, 33, 2, 201, 1, 305, 201]
"""<|im_start|> user \\n What is 3 + 4 ? <|im_end|> \\n <|im_start|> assistant \\n, as vLLM 0.32 tells them."""

THOUGHT, ANSWER = "The numbers are 3 and 4.\nThe operation is add.\n3 + 4 = 7.", "The sum is 3 + 4 = **7**."


@pytest.fixture(scope="module")
def tokenizer() -> TargetTokenizer:
    return load(TINY_TARGET)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """A copy of the tiny target's tokenizer, to be changed."""
    folder = tmp_path / "target"
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "config.json"):
        shutil.copy(TINY_TARGET / name, folder)
    return folder


def again(
    tokenizer: TargetTokenizer,
    produced: str,
    reasoning: str | None,
    content: str | None,
    finish_reason: str = "stop",
    **details: Any,
) -> tuple[list[int], list[int]]:
    """What the model produced, and what is made of the text that a server gave of it."""
    ids = tokenizer.encode(produced)
    made = tokenizer.completion_ids(
        SUM,
        reasoning=reasoning,
        content=content,
        finish_reason=finish_reason,
        completion_tokens=len(ids),
        **details,
    )
    return ids, made


def test_prompt_ids_are_those_that_the_engine_reports(tokenizer: TargetTokenizer) -> None:
    assert tokenizer.prompt_ids(SUM) == SUM_IDS
    assert tokenizer.prompt_ids(SUM, thinking=True) == SUM_IDS


def test_thinking_off_is_written_into_the_prompt_and_a_template_argument_wins(tokenizer: TargetTokenizer) -> None:
    off = tokenizer.prompt_ids(SUM, thinking=False)

    assert off[:16] == SUM_IDS
    assert tokenizer.decode(off[16:]) == "<think>\n\n</think>\n\n"
    assert tokenizer.prompt_ids(SUM, thinking=True, template_kwargs={"enable_thinking": False}) == off


def test_parts_of_a_message_are_one_text_and_no_content_is_an_empty_one(tokenizer: TargetTokenizer) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "What is"}, {"type": "text", "text": "3 + 4?"}]}]
    calls = [*SUM, {"role": "assistant", "content": None}, {"role": "user", "content": "And 5?"}]

    assert tokenizer.prompt_ids(parts) == tokenizer.prompt_ids([{"role": "user", "content": "What is\n3 + 4?"}])
    assert "<|im_start|>assistant\n<|im_end|>" in tokenizer.decode(tokenizer.prompt_ids(calls))


@pytest.mark.parametrize(
    ("produced", "reasoning", "content", "finish_reason"),
    [
        (f"<think>\n{THOUGHT}\n</think>\n\n{ANSWER}<|im_end|>", THOUGHT, ANSWER, "stop"),
        (f"<think>\n{THOUGHT}\n</think>\n\n{ANSWER}<|im_end|>", f"\n{THOUGHT}\n", f"\n\n{ANSWER}", "stop"),
        (f"<think>\n3 + 4 = 7</think>\n\n{ANSWER}<|im_end|>", "3 + 4 = 7", ANSWER, "stop"),
        (f"{ANSWER}<|im_end|>", None, ANSWER, "stop"),
        (f"<think>\n\n</think>\n\n{ANSWER}<|im_end|>", None, ANSWER, "stop"),
        (f"<think>\n{THOUGHT}<|im_end|>", THOUGHT, None, "stop"),
        (f"<think>\n{THOUGHT}<|im_end|>", f"\n{THOUGHT}", None, "stop"),
        (f"<think>\n{THOUGHT}\n</think>\n\n<|im_end|>", THOUGHT, "", "stop"),
        (f"{ANSWER}<|im_end|>", ANSWER, None, "stop"),
        ("<think>\nThe numbers are 3 and", "The numbers are 3 and", "", "length"),
        ("<think>\nThe numbers are 3 and ", "\nThe numbers are 3 and ", None, "length"),
        ("The sum is 3", "The sum is 3", None, "length"),
        (f"<think>\n{THOUGHT}\n</think>\n\nThe sum", THOUGHT, "The sum", "length"),
        (f"<think>\n{THOUGHT}\n</think>\n\nThe sum is ", f"\n{THOUGHT}\n", "\n\nThe sum is ", "length"),
    ],
    ids=[
        "whole, stripped by the server",
        "whole, not stripped",
        "no line break before the closing mark",
        "no thought",
        "an empty thought",
        "ended in its thought",
        "ended in its thought, not stripped",
        "thought only, closed",
        "never opened its thought, taken for a thought (vLLM)",
        "cut in its thought",
        "cut in its thought, not stripped",
        "cut, never opened",
        "cut in its content",
        "cut in its content, not stripped",
    ],
)
def test_ids_of_a_text_are_those_that_were_produced(
    tokenizer: TargetTokenizer, produced: str, reasoning: str | None, content: str | None, finish_reason: str
) -> None:
    ids, made = again(tokenizer, produced, reasoning, content, finish_reason)

    assert tokenizer.decode(made) == tokenizer.decode(ids)
    assert made == ids


def test_an_answer_to_a_prompt_without_thinking_is_its_content(tokenizer: TargetTokenizer) -> None:
    ids, made = again(tokenizer, f"{ANSWER}<|im_end|>", None, ANSWER, thinking=False)

    assert made == ids


def test_a_thought_that_the_prompt_has_opened_is_not_opened_again(target: Path) -> None:
    template = target / "chat_template.jinja"
    template.write_text(
        template.read_text().replace(
            "{{- '<|im_start|>assistant\\n' }}\n{%- if en", "{{- '<|im_start|>assistant\\n<think>\\n' }}\n{%- if en"
        )
    )
    tokenizer = load(target)
    assert tokenizer.decode(tokenizer.prompt_ids(SUM)).endswith("<think>\n")

    ids, made = again(tokenizer, f"{THOUGHT}\n</think>\n\n{ANSWER}<|im_end|>", THOUGHT, ANSWER)
    ended, ended_made = again(tokenizer, f"{THOUGHT}<|im_end|>", THOUGHT, None)

    assert made == ids
    assert ended_made == ended


@pytest.mark.parametrize("finish_reason", ["stop", "length"])
def test_where_no_candidate_has_the_servers_count_the_counts_differ(
    tokenizer: TargetTokenizer, finish_reason: str
) -> None:
    made = tokenizer.completion_ids(
        SUM, reasoning=THOUGHT, content=ANSWER, finish_reason=finish_reason, completion_tokens=500
    )

    text = f"<think>\n{THOUGHT}\n</think>\n\n{ANSWER}"
    assert tokenizer.decode(made) == (f"{text}<|im_end|>" if finish_reason == "stop" else text)


def test_no_stop_token_is_invented_for_an_answer_that_was_cut(tokenizer: TargetTokenizer) -> None:
    one_more = len(tokenizer.encode(f"<think>\n{THOUGHT}\n</think>\n\nThe sum")) + 1

    made = tokenizer.completion_ids(
        SUM, reasoning=THOUGHT, content="The sum", finish_reason="length", completion_tokens=one_more
    )

    assert tokenizer.encode("<|im_end|>")[0] not in made
    assert len(made) != one_more


def test_an_answer_of_nothing_has_its_stop_token_alone(tokenizer: TargetTokenizer) -> None:
    ids, made = again(tokenizer, "<|im_end|>", None, "")

    assert made == ids == [2]


def test_the_end_of_a_turn_is_what_the_template_writes_there(tokenizer: TargetTokenizer, target: Path) -> None:
    template = target / "chat_template.jinja"
    template.write_text(template.read_text().replace("<|im_end|>", "<|endoftext|>"))

    assert tokenizer.end_of_turn == "<|im_end|>"
    assert load(target).end_of_turn == "<|endoftext|>"


def test_a_fingerprint_changes_with_vocabulary_and_template_and_with_nothing_else(target: Path) -> None:
    before = load(target).fingerprint()
    assert before == load(TINY_TARGET).fingerprint()

    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 9}))
    assert load(target).fingerprint() == before

    template = target / "chat_template.jinja"
    template.write_text(template.read_text() + " ")
    other_template = load(target).fingerprint()
    rules = json.loads((target / "tokenizer.json").read_text())
    rules["model"]["merges"].pop()
    (target / "tokenizer.json").write_text(json.dumps(rules))
    other_vocabulary = load(target).fingerprint()
    assert len({before, other_template, other_vocabulary}) == 3


def test_the_vocabulary_counts_added_tokens(tokenizer: TargetTokenizer) -> None:
    assert tokenizer.vocab_size == 2048
    assert max(tokenizer.encode("<think></think>")) < tokenizer.vocab_size


@pytest.mark.parametrize("name", ["tokenizer.json", "chat_template.jinja"])
def test_a_folder_without_tokenizer_or_template_says_what_is_missing(target: Path, name: str) -> None:
    (target / name).unlink()

    with pytest.raises(TargetError, match="chat template" if "template" in name else "tokenizer") as caught:
        load(target)

    assert str(target) in str(caught.value)
    assert name in str(caught.value)


def test_a_broken_tokenizer_file_is_named(target: Path) -> None:
    (target / "tokenizer.json").write_text('{"version": ')

    with pytest.raises(TargetError, match="no tokenizer that can be read"):
        load(target)


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="nowhere"):
        load(tmp_path / "nowhere")


def test_the_context_is_read_from_the_config(target: Path, tmp_path: Path) -> None:
    assert context_tokens(target) == 1024

    (target / "config.json").write_text('{"text_config": {"max_position_embeddings": 4096}}')
    assert context_tokens(target) == 4096

    (target / "config.json").write_text("{}")
    assert context_tokens(target) is None
    (target / "config.json").write_text("[1]")
    assert context_tokens(target) is None
    assert context_tokens(tmp_path / "nowhere") is None


def test_the_tokenizer_needs_no_torch_and_importing_it_no_transformers() -> None:
    program = f"""
import sys
import draftfleet.tokens
assert not {{"torch", "transformers", "tokenizers"}} & set(sys.modules)
tokenizer = draftfleet.tokens.load({str(TINY_TARGET)!r})
tokenizer.completion_ids({SUM!r}, reasoning="a", content="b", finish_reason="stop", completion_tokens=9)
assert "transformers" in sys.modules
assert "torch" not in sys.modules
"""

    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_a_folder_below_home_may_be_named_with_a_tilde(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (target / "config.json").write_text('{"max_position_embeddings": 77}')
    monkeypatch.setenv("HOME", str(target.parent))

    assert load(f"~/{target.name}").path == str(target)
    assert context_tokens(f"~/{target.name}") == 77
