"""How much there is to do: tokens to generate, hours of servers, bytes in the storage. Every assumption is named."""

from __future__ import annotations

from dataclasses import dataclass, field

from producer.preview.evidence import Evidence
from producer.preview.lengths import Lengths
from producer.preview.survey import Survey

USUAL_TOKENS = 1800
"""Mean length of an answer where nothing tells: what 2,700 answers with reasoning had (1,818)."""

RATES = (500.0, 2000.0, 8000.0)
"""Tokens a second of one server, from which a person may choose where nothing was measured."""

BYTES_PER_COMPLETION_TOKEN = 3.0
BYTES_PER_PROMPT_TOKEN = 5.0
"""Of sample and prompt shards: benchmarks/results/shard_bytes_2-core-cpu_2026-11-30.md."""

CHARACTERS_PER_TOKEN = 4
"""Of English, where no tokenizer tells."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hours:
    """`server_hours` are those of all servers together; `hours` pass."""

    tokens_per_s: float
    server_hours: float
    hours: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Of the prompts that are new to the run. `because` says for each assumption where it comes from."""

    answers: int
    mean_tokens: float
    tokens: int
    prompt_tokens: int
    servers: int
    hours: list[Hours]
    bytes: int
    free_bytes: int | None
    because: dict[str, str] = field(default_factory=dict[str, str])


def work(
    survey: Survey,
    lengths: Lengths,
    *,
    samples: int,
    earlier: Evidence | None,
    mean_tokens: float | None,
    tokens_per_s: float | None,
    servers: int,
    named_servers: int,
    free_bytes: int | None,
) -> Work:
    """`samples` are of each prompt. `mean_tokens`, `tokens_per_s` and `servers` (0: unsaid) are what a person says."""
    because: dict[str, str] = {}
    mean, because["mean_tokens"] = _mean(mean_tokens, earlier, lengths.max_tokens)
    num_servers, because["servers"] = _servers(servers, named_servers)
    rates, because["tokens_per_s"] = _rates(tokens_per_s, earlier)
    answers = survey.answers * samples
    tokens = round(answers * mean)
    prompt_tokens = lengths.mean * survey.new * samples / (1 if lengths.unit == "tokens" else CHARACTERS_PER_TOKEN)
    if earlier is not None:
        size = tokens * earlier.bytes_per_token
        because["bytes"] = f"{earlier.bytes_per_token:.1f} bytes a token, as in run {earlier.run}"
    else:
        size = tokens * BYTES_PER_COMPLETION_TOKEN + prompt_tokens * BYTES_PER_PROMPT_TOKEN
        because["bytes"] = (
            f"{BYTES_PER_COMPLETION_TOKEN:g} bytes a token of an answer and {BYTES_PER_PROMPT_TOKEN:g} a token of a "
            "prompt, as measured with English text"
        )
    return Work(
        answers=answers,
        mean_tokens=mean,
        tokens=tokens,
        prompt_tokens=round(prompt_tokens),
        servers=num_servers,
        hours=[
            Hours(tokens_per_s=rate, server_hours=tokens / rate / 3600, hours=tokens / rate / 3600 / num_servers)
            for rate in rates
        ],
        bytes=round(size),
        free_bytes=free_bytes,
        because=because,
    )


def _mean(said: float | None, earlier: Evidence | None, max_tokens: int) -> tuple[float, str]:
    if said is not None:
        return min(said, float(max_tokens)), "--mean-tokens" + (" cut to max_tokens" if said > max_tokens else "")
    if earlier is not None:
        mean = min(earlier.mean_tokens, float(max_tokens))
        return mean, f"the mean of {earlier.answers:,} answers in run {earlier.run}"
    usual = "sampling.max_tokens" if max_tokens <= USUAL_TOKENS else "usual for answers with reasoning"
    return float(min(max_tokens, USUAL_TOKENS)), f"a guess, {usual}: --mean-tokens says it"


def _servers(said: int, named: int) -> tuple[int, str]:
    if said:
        return said, "--num-servers"
    if named:
        return named, "worker.servers of this node"
    return 1, "a guess: --num-servers says it"


def _rates(said: float | None, earlier: Evidence | None) -> tuple[list[float], str]:
    if said is not None:
        return [said], "--tokens-per-second"
    if earlier is not None and earlier.tokens_per_s:
        return [earlier.tokens_per_s], f"what one of {earlier.servers} servers made in run {earlier.run}"
    return list(RATES), "not known: --tokens-per-second says what one server makes"
