"""[sampling]: what is asked of the target."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import Field, NonNegativeFloat, PositiveInt, StringConstraints, field_serializer, model_validator

from draftfleet.settings.section import Section

Text = Annotated[str, StringConstraints(min_length=1)]


class Variant(Section):
    """One way of asking among several. A row draws one by weight; what it leaves unset is as in `sampling`."""

    weight: float = Field(default=1.0, ge=0, allow_inf_nan=False, description="Its share is this, of the sum of all.")
    temperature: NonNegativeFloat | None = Field(default=None, description="As of `sampling`.")
    top_p: float | None = Field(default=None, gt=0, le=1, description="As of `sampling`.")
    top_k: int | None = Field(default=None, ge=0, description="As of `sampling`.")
    min_p: float | None = Field(default=None, ge=0, le=1, description="As of `sampling`.")
    reasoning_effort: Text | None = Field(default=None, description="As of `sampling`.")
    thinking: bool | None = Field(default=None, description="As of `sampling`.")
    max_tokens: PositiveInt | None = Field(default=None, description="As of `sampling`.")

    def asked(self) -> dict[str, Any]:
        """What it sets, without the weight."""
        return self.model_dump(exclude={"weight"}, exclude_none=True)


class Sampling(Section):
    """What is asked of the target. All of it is pinned in run.json."""

    max_tokens: PositiveInt = Field(default=8192, description="Longest completion in tokens, reasoning included.")
    temperature: NonNegativeFloat | None = Field(default=None, description="Unset: the server's own default.")
    top_p: float | None = Field(default=None, gt=0, le=1, description="Unset: the server's own default.")
    top_k: int | None = Field(default=None, ge=0, description="0: of all tokens. Unset: the server's own default.")
    min_p: float | None = Field(default=None, ge=0, le=1, description="Unset: the server's own default.")
    presence_penalty: float | None = Field(default=None, ge=-2, le=2, description="Unset: the server's own default.")
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2, description="Unset: the server's own default.")
    repetition_penalty: float | None = Field(default=None, gt=0, le=2, description="Unset: the server's own default.")
    stop: list[Text] = Field(default_factory=list[Text], description="Texts that end an answer.")
    reasoning_effort: Text | None = Field(
        default=None, description='As the model knows it, such as "low" or "high". Unset: the template decides.'
    )
    thinking: bool | None = Field(
        default=None, description="Reasoning on or off through the chat template. Unset: the template decides."
    )
    thinking_share: float | None = Field(
        default=None, ge=0, le=1, description="Share of rows with reasoning on; the others have it off."
    )
    mixture: list[Variant] = Field(
        default_factory=list[Variant], description="Ways of asking, of which each row draws one by weight."
    )
    n: PositiveInt = Field(default=1, description="Samples of each prompt.")
    seed: int | None = Field(
        default=None, description="Each row's seed derives from this and its key. Unset: none is sent."
    )
    extra_body: dict[str, Any] = Field(default_factory=dict, description="Anything else, sent as it is.")

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        if self.thinking_share is not None and self.thinking is not None:
            raise ValueError(
                f"thinking = {str(self.thinking).lower()} and thinking_share = {self.thinking_share:g} cannot both "
                "hold: set one of them"
            )
        if self.mixture and not sum(one.weight for one in self.mixture):
            raise ValueError("the weights of its mixture are all 0: give one of them a weight above 0")
        for number, one in enumerate(self.mixture):
            if not one.asked():
                raise ValueError(f"mixture[{number}] sets nothing but its weight: {_SETTABLE}")
            if one.thinking is not None and self.thinking_share is not None:
                raise ValueError(f"mixture[{number}] sets thinking, and thinking_share is set: leave one of them out")
        if self.extra_body.get("n", 1) != 1:
            raise ValueError(f"extra_body.n = {self.extra_body['n']!r} would lose answers: set sampling.n")
        return self

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """What the chat template is told, by the server or by us: one rule, so that both render the same prompt.

        An effort switches the thinking on, "none" off, as vLLM and SGLang do it. Each key of `extra_body` wins.
        """
        effort, thinking = self.reasoning_effort, self.thinking
        if thinking is None and effort is not None:
            thinking = effort != "none"
        told = {"enable_thinking": thinking, "reasoning_effort": effort}
        given: dict[str, Any] = self.extra_body.get("chat_template_kwargs") or {}
        return {name: value for name, value in told.items() if value is not None} | given

    @field_serializer("mixture")
    def _only_what_is_set(self, mixture: list[Variant]) -> list[dict[str, Any]]:
        """A knob that a later version adds changes nothing in what an earlier one pinned."""
        return [one.model_dump(exclude_none=True) for one in mixture]


_SETTABLE = f"set one of {', '.join(name for name in Variant.model_fields if name != 'weight')}"
