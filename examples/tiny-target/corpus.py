"""The conversations that the tiny target was trained on: all of them are made up here, none is downloaded.

An exchange is a question, the thought that leads to the answer, and the answer. A small model learns their form well
(well-formed traces, numbers copied from the question) and their content badly; form is what a drafter feeds on.

    python examples/tiny-target/corpus.py            prints a few conversations
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass

from word_problems import WORD_PROBLEMS
from words import CAPITALS, DAYS, ITEMS, MONTHS, NAMES, OPERATIONS, OPPOSITES, PLACES, SYSTEM_PROMPTS, WORDS

Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class Exchange:
    question: str
    thought: str
    answer: str


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages in the OpenAI form; every answer has `reasoning_content`, empty where the model shall not think."""

    messages: list[Message]
    thinks: bool


def conversations(seed: int, count: int) -> list[Conversation]:
    rng = random.Random(seed)
    return [conversation(rng) for _ in range(count)]


def conversation(rng: random.Random) -> Conversation:
    """One to three exchanges; a quarter have a system prompt, seven in ten think."""
    messages: list[Message] = []
    if rng.random() < 0.25:
        messages.append({"role": "system", "content": rng.choice(SYSTEM_PROMPTS)})
    thinks = rng.random() < 0.7
    turns = rng.choices([1, 2, 3], [80, 15, 5])[0]
    kinds, weights = zip(*KINDS, strict=True)
    for _ in range(turns):
        made: Exchange = rng.choices(kinds, weights)[0](rng)
        thought = made.thought if thinks else ""
        messages.append({"role": "user", "content": made.question})
        messages.append({"role": "assistant", "content": made.answer, "reasoning_content": thought})
    return Conversation(messages, thinks)


def word_problem(rng: random.Random) -> Exchange:
    n, m = rng.sample(NAMES, 2)
    it = rng.choice(ITEMS)
    a, b, c = rng.randint(2, 60), rng.randint(2, 40), rng.randint(2, 9)
    question, thought, result, explanation = rng.choice(WORD_PROBLEMS)(rng, n=n, m=m, it=it, a=a, b=b, c=c)
    return Exchange(question, thought, f"{explanation}\n\nThe answer is **{result}**.")


def arithmetic(rng: random.Random) -> Exchange:
    name = rng.choice(list(OPERATIONS))
    sign, noun = OPERATIONS[name]
    largest = 12 if name == "multiply" else 99
    smallest = 2 if name == "multiply" else 0
    a, b = rng.randint(smallest, largest), rng.randint(smallest, largest)
    if name == "subtract" and b > a:
        a, b = b, a
    value = {"add": a + b, "subtract": a - b, "multiply": a * b}[name]
    request = f"Please subtract {b} from {a}." if name == "subtract" else f"Please {name} {a} and {b}."
    return Exchange(
        rng.choice([f"What is {a} {sign} {b}?", f"Compute {a} {sign} {b}.", request]),
        f"The numbers are {a} and {b}.\nThe operation is {name}.\n{a} {sign} {b} = {value}.",
        f"The {noun} is {a} {sign} {b} = **{value}**.",
    )


def spelling(rng: random.Random) -> Exchange:
    kind = rng.randrange(5)
    word = rng.choice(WORDS)
    letters = " ".join(word)
    if kind == 0:
        return Exchange(
            f'Spell the word "{word}".',
            f"The word is {word}.\nIts letters are: {letters}.",
            f"The word {word} is spelled {'-'.join(word.upper())}.",
        )
    if kind == 1:
        return Exchange(
            f'Write the word "{word}" backwards.',
            f"The letters are: {letters}.\nBackwards: {' '.join(word[::-1])}.",
            f'The word "{word}" backwards is "{word[::-1]}".',
        )
    if kind == 2:
        counted = "\n".join(f"{place}: {letter}" for place, letter in enumerate(word, 1))
        return Exchange(
            f'How many letters are in the word "{word}"?',
            f"I count the letters.\n{counted}\nThere are {len(word)} letters.",
            f'The word "{word}" has **{len(word)}** letters.',
        )
    return _word_list(rng, sort=kind == 3)


def _word_list(rng: random.Random, *, sort: bool) -> Exchange:
    words = rng.sample(WORDS, rng.randint(3, 6))
    listed = ", ".join(words)
    if sort:
        initials = ", ".join(word[0] for word in words)
        numbered = "\n".join(f"{place}. {word}" for place, word in enumerate(sorted(words), 1))
        return Exchange(
            f"Sort these words alphabetically: {listed}.",
            f"I look at the first letters: {initials}.\nSorted: {', '.join(sorted(words))}.",
            f"Here is the sorted list:\n\n{numbered}",
        )
    return Exchange(
        f"Make a list of these words in capital letters: {listed}.",
        f"There are {len(words)} words.\nI write each word in capital letters.",
        "Here is the list:\n\n" + "\n".join(f"- {word.upper()}" for word in words),
    )


def fact(rng: random.Random) -> Exchange:
    kind = rng.randrange(4)
    if kind == 0:
        country, capital = rng.choice(list(CAPITALS.items()))
        return Exchange(
            rng.choice([f"What is the capital of {country}?", f"Name the capital city of {country}."]),
            f"The question is about {country}.\nThe capital of {country} is {capital}.",
            f"The capital of {country} is {capital}.",
        )
    if kind == 1:
        word, opposite = rng.choice(list(OPPOSITES.items()))
        if rng.random() < 0.5:
            word, opposite = opposite, word
        return Exchange(
            f"What is the opposite of {word}?",
            f"The word is {word}.\nIts opposite is {opposite}.",
            f"The opposite of {word} is {opposite}.",
        )
    cycle, noun = (DAYS, "day") if kind == 2 else (MONTHS, "month")
    here, direction = rng.randrange(len(cycle)), rng.choice([1, -1])
    side = "after" if direction == 1 else "before"
    return Exchange(
        f"Which {noun} comes {side} {cycle[here]}?",
        f"The {noun} is {cycle[here]}.\nI need the {noun} {side} it.",
        f"The {noun} {side} {cycle[here]} is {cycle[(here + direction) % len(cycle)]}.",
    )


def counting(rng: random.Random) -> Exchange:
    first, step, count = rng.randint(0, 30), rng.randint(1, 9), rng.randint(5, 14)
    numbers = [first + place * step for place in range(count)]
    return Exchange(
        f"Count from {first} to {numbers[-1]} in steps of {step}.",
        f"I start at {first} and add {step} each time.\nI stop at {numbers[-1]}.",
        ", ".join(map(str, numbers)) + ".",
    )


def code(rng: random.Random) -> Exchange:
    name = rng.choice(list(OPERATIONS))
    sign, noun = OPERATIONS[name]
    x, y = rng.sample(list("abcxymnpq"), 2)
    kind = rng.randrange(3)
    if kind == 0:
        return Exchange(
            f"Write a Python function that returns the {noun} of {x} and {y}.",
            f"The function takes {x} and {y}.\nIt returns {x} {sign} {y}.",
            f"```python\ndef {name}({x}, {y}):\n    return {x} {sign} {y}\n```\n\n"
            f"The function `{name}` returns the {noun} of `{x}` and `{y}`.",
        )
    if kind == 1:
        first, last = sorted(rng.sample(range(1, 50), 2))
        return Exchange(
            f"Write a Python loop that prints the numbers from {first} to {last}.",
            f"I use range({first}, {last + 1}) because the end is not included.",
            f"```python\nfor i in range({first}, {last + 1}):\n    print(i)\n```\n\n"
            f"The loop prints every number from {first} to {last}.",
        )
    person, age = rng.choice(NAMES), rng.randint(5, 90)
    city = CAPITALS[rng.choice(list(CAPITALS))]
    return Exchange(
        f"Turn this into JSON: {person} is {age} years old and lives in {city}.",
        f"The name is {person}.\nThe age is {age}.\nThe city is {city}.",
        f"```json\n{json.dumps({'name': person, 'age': age, 'city': city}, indent=2)}\n```",
    )


def story(rng: random.Random) -> Exchange:
    n, m = rng.sample(NAMES, 2)
    it, place, word = rng.choice(ITEMS), rng.choice(PLACES), rng.choice(WORDS)
    day = rng.randrange(len(DAYS))
    return Exchange(
        f"Tell me a short story about {n} and a {word}.",
        f"The story needs {n} and a {word}.\nIt happens at the {place}.\nIt should end well.",
        f"On {DAYS[day]} morning, {n} went to the {place} with a bag of {it}. "
        f'Near the gate, {n} found a {word} on the ground. "Is this yours?" {n} asked {m}. '
        f'"Yes, I lost it on {DAYS[day - 1]}," said {m}. {n} gave the {word} back, and {m} was very happy. '
        f"They shared the {it} and became good friends. The end.",
    )


def chat(rng: random.Random) -> Exchange:
    name = rng.choice(NAMES)
    return rng.choice(
        [
            Exchange(
                f"Hello, my name is {name}.",
                f"The user says hello.\nThe name is {name}.",
                f"Hello {name}! How can I help you today?",
            ),
            Exchange(
                "Who are you?",
                "The user asks who I am.",
                "I am a tiny language model made for tests. I can count, spell, sort words and solve small problems.",
            ),
            Exchange(
                "Thank you!",
                "The user thanks me.",
                "You are welcome! Is there anything else I can do for you?",
            ),
            Exchange(
                "What can you do?",
                "The user asks what I can do.",
                "I can do these things:\n\n1. solve small arithmetic problems\n2. spell and sort words\n"
                "3. name capital cities\n4. write short stories and code",
            ),
        ]
    )


KINDS: list[tuple[Callable[[random.Random], Exchange], int]] = [
    (word_problem, 34),
    (arithmetic, 14),
    (spelling, 14),
    (fact, 10),
    (counting, 8),
    (code, 10),
    (story, 7),
    (chat, 3),
]
"""What is talked about, and how often."""


if __name__ == "__main__":
    for shown in conversations(seed=1, count=6):
        print(json.dumps(shown.messages, indent=2))
