"""Make examples/prompts/prompts.jsonl: questions of the kinds that the tiny target knows, ending with a user's turn.

    python examples/tiny-target/make_prompts.py

Seeds are not those of the pretraining. Prompts are distinct, and a question that a held-out prompt asks stands in no
train prompt, in any turn, both by normalised text; so nothing that acceptance is measured on was trained on.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path

from corpus import Message, conversation

OUT = Path(__file__).parent.parent / "prompts" / "prompts.jsonl"
HELDOUT_SEED, TRAIN_SEED = 7_001, 7_002


def make(num_train: int, num_heldout: int) -> Iterator[dict[str, object]]:
    """Held-out prompts stand evenly among the others, so that the beginning of the file has both."""
    seen: set[str] = set()
    heldout = list(_distinct(random.Random(HELDOUT_SEED), num_heldout, seen, frozenset()))
    asked = frozenset(question for prompt in heldout for question in questions(prompt))
    every = num_train // num_heldout
    for number, prompt in enumerate(_distinct(random.Random(TRAIN_SEED), num_train, seen, asked)):
        if number % every == 0 and heldout:
            yield {"split": "heldout", "messages": heldout.pop(0)}
        yield {"split": "train", "messages": prompt}


def _distinct(rng: random.Random, count: int, seen: set[str], barred: frozenset[str]) -> Iterator[list[Message]]:
    """`count` new prompts that ask nothing of `barred`; each is added to `seen`."""
    while count:
        prompt = _without_answer(conversation(rng).messages)
        text = normalised(" ".join(message["content"] for message in prompt))
        if text in seen or not barred.isdisjoint(questions(prompt)):
            continue
        seen.add(text)
        count -= 1
        yield prompt


def _without_answer(messages: list[Message]) -> list[Message]:
    """Up to the last question. Earlier answers are given as a client would send them, without their thoughts."""
    return [{"role": message["role"], "content": message["content"]} for message in messages[:-1]]


def questions(prompt: list[Message]) -> set[str]:
    return {normalised(message["content"]) for message in prompt if message["role"] == "user"}


def normalised(text: str) -> str:
    return " ".join(text.casefold().split())


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the prompts of the demo.")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--train", type=int, default=1600, help="train prompts")
    parser.add_argument("--heldout", type=int, default=64, help="held-out prompts")
    options = parser.parse_args()
    lines = [json.dumps(prompt, ensure_ascii=False) for prompt in make(options.train, options.heldout)]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{len(lines)} prompts in {options.out}")


if __name__ == "__main__":
    main()
