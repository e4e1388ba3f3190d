"""[sampling]: knobs that do not fit together are told before anything is asked."""

from __future__ import annotations

from typing import Any

import pytest

from draftfleet.errors import SettingsError
from draftfleet.settings import environment, load


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"thinking": True, "thinking_share": 0.5}, "thinking = true and thinking_share = 0.5 cannot both hold"),
        ({"mixture": [{"weight": 0, "temperature": 1}]}, "the weights of its mixture are all 0"),
        ({"mixture": [{"temperature": 1}, {"weight": 2}]}, "mixture[1] sets nothing but its weight: set one of temper"),
        ({"mixture": [{"thinking": True}], "thinking_share": 0.5}, "mixture[0] sets thinking, and thinking_share is"),
        ({"mixture": [{"temperature": -1}]}, "sampling.mixture[0].temperature = -1: Input should be greater than"),
        ({"mixture": [{"temprature": 1}]}, "unknown key sampling.mixture[0].temprature; did you mean"),
        ({"mixture": [{"weight": -1, "temperature": 1}]}, "sampling.mixture[0].weight = -1"),
        ({"thinking_share": 1.5}, "sampling.thinking_share = 1.5: Input should be less than or equal to 1"),
        ({"n": 0}, "sampling.n = 0: Input should be greater than 0"),
        ({"extra_body": {"n": 4}}, "extra_body.n = 4 would lose answers: set sampling.n"),
        ({"stop": [""]}, "sampling.stop[0] = ''"),
        ({"top_k": -1}, "sampling.top_k = -1"),
    ],
)
def test_knobs_that_cannot_hold_together_are_refused_with_the_reason(flags: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingsError) as error:
        load(flags={f"sampling.{name}": value for name, value in flags.items()})

    assert said in str(error.value)
    assert "(secret)" not in str(error.value)


def test_a_mixture_reaches_a_child_process_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = load(flags={"sampling.mixture": [{"weight": 3, "temperature": 1}, {"thinking": False}]})

    for name, value in environment(settings).items():
        monkeypatch.setenv(name, value)

    assert load().sampling == settings.sampling


def test_a_variant_is_pinned_by_what_it_sets() -> None:
    sampling = load(flags={"sampling.mixture": [{"weight": 3, "temperature": 1}, {"thinking": False}]}).sampling

    pinned = sampling.model_dump(mode="json")["mixture"]

    assert pinned == [{"weight": 3.0, "temperature": 1.0}, {"weight": 1.0, "thinking": False}]
