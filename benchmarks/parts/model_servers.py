"""The servers that the fleet figures are measured on: seven of 48 slots, by the shipped model of a server.

Answers have a log-normal length (mean 1,818 tokens, sigma 0.9, at most 8,192) that the prompt decides. All times are
divided by a time scale.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from draftfleet.records import Prompt, prompt_id
from draftfleet.testing import FakeProcess

MODEL = "fake"
NUM_SERVERS, SLOTS = 7, 48
TOKENS_PER_S = 75.0
"""Of each sequence, with all slots taken."""
HALF_SPEED_AT = 64
ALONE_S = 1 / TOKENS_PER_S / (1 + (SLOTS - 1) / HALF_SPEED_AT)
"""Seconds per token of a sequence that has a server to itself."""
LENGTHS = {"tokens": 1818, "spread": 0.9, "most_tokens": 8192}
DOWN = (0.4, 0.6)
"""Where one server goes and comes back: the shares of the expected time between which it is down."""


@dataclass(frozen=True, slots=True)
class Counters:
    """Answers written, their tokens, and the tokens made for these and for all other requests."""

    answered: int
    tokens_answered: int
    tokens_made: int


class Servers:
    """Seven of them for one measurement, with their capacity over time."""

    def __init__(self, case: str, time_scale: float, num_rows: int) -> None:
        self._case = case
        self._time_scale = time_scale
        self._expected_s = num_rows * LENGTHS["tokens"] / (NUM_SERVERS * SLOTS * TOKENS_PER_S) / time_scale
        self._all: list[FakeProcess] = []
        self._down_s = 0.0

    @contextmanager
    def running(self) -> Generator[list[str]]:
        with ExitStack() as stack:
            for number in range(NUM_SERVERS):
                speed = 0.5 if self._case == "slow" and number == 0 else 1.0
                server = FakeProcess(
                    model=MODEL, slots=SLOTS, seconds_per_token=ALONE_S, half_speed_at=HALF_SPEED_AT,
                    speed=speed, time_scale=self._time_scale, **LENGTHS,
                )  # fmt: skip
                self._all.append(stack.enter_context(server))
            yield [server.url for server in self._all]

    def wait_for_first_request(self) -> float:
        """The moment of it."""
        while not any(server.stats()["requests"] for server in self._all):
            time.sleep(0.02)
        started = time.monotonic()
        if self._case == "returning":
            threading.Thread(target=self._go_down, daemon=True).start()
        return started

    def capacity(self, seconds: float) -> float:
        """Tokens that could have been made in that time."""
        shares = NUM_SERVERS - (0.5 if self._case == "slow" else 0)
        return (shares * seconds - self._down_s) * SLOTS * TOKENS_PER_S * self._time_scale

    def worst_lag_s(self) -> float:
        """Mean lateness of answers at the latest server, in modelled seconds."""
        return max(server.stats()["reply_lag_s"]["mean"] for server in self._all) * self._time_scale

    def counters(self) -> Counters:
        """Over all servers."""
        stats = [server.stats() for server in self._all]
        answered = sum(one["statuses"].get("200", 0) for one in stats)
        return Counters(
            answered=answered,
            tokens_answered=sum(one["tokens"] for one in stats),
            tokens_made=sum(int(one["generated_tokens"]) for one in stats),
        )

    def _go_down(self) -> None:
        begin, end = (share * self._expected_s for share in DOWN)
        time.sleep(begin)
        gone = time.monotonic()
        self._all[-1].change(alive=False)
        time.sleep(end - begin)
        self._all[-1].change(alive=True)
        self._down_s = time.monotonic() - gone


def prompts(count: int) -> list[Prompt]:
    conversations = [[{"role": "user", "content": f"Question {number}?"}] for number in range(count)]
    return [Prompt(prompt_id(messages, None), "train", messages) for messages in conversations]
