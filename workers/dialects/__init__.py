"""How each inference server departs from the OpenAI API: pure functions of dicts, one module per server.

A dialect builds the body of a request, reads the body of an answer, and says what went wrong with a refused one. It
opens no connection. `load("vllm")` imports `workers.dialects.vllm` on use.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, cast

from draftfleet.errors import ServerError, SettingsError, Transient
from draftfleet.records import Conversation, Outcome
from draftfleet.redaction import redact
from draftfleet.settings import Sampling

DIALECTS = {
    "vllm": "workers.dialects.vllm",
    "sglang": "workers.dialects.sglang",
    "sglang-native": "workers.dialects.sglang_native",
    "llamacpp": "workers.dialects.llamacpp",
    "llamacpp-native": "workers.dialects.llamacpp_native",
    "transformers": "workers.dialects.transformers",
    "ollama": "workers.dialects.ollama",
    "openai": "workers.dialects.openai",
}
"""Name of a dialect and its module, in the order in which `detect` asks. `openai` fits any server, so it is last."""

UNSUITABLE = {
    "ollama": "it is Ollama, which cuts a prompt that is over its context without a word, and gives no token ids: what "
    "the model saw and said cannot be known. Serve the model with vLLM, SGLang or llama.cpp; "
    'worker.dialect = "ollama" takes it all the same'
}
"""Why a server that speaks this dialect is left out, unless worker.dialect names it."""


_SURROGATES = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One question to a server. `sampling` is what this row has drawn.

    `prompt_token_ids` are the prompt as ids, where they are known: for dialects that ask with ids
    (`WANTS_PROMPT_IDS`), and for continuations, where the answer so far is part of them.
    """

    model: str
    messages: Conversation
    sampling: Sampling
    tools: list[dict[str, Any]] | None = None
    seed: int | None = None
    prompt_token_ids: list[int] | None = None


class Request(NamedTuple):
    """What is posted, and where: a path such as /v1/chat/completions, and a JSON body."""

    path: str
    body: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What a server answered to one request.

    `token_ids` are exactly what the model produced, reasoning and stop token included, or None where the server does
    not tell. `reasoning_source` names where the reasoning stood: `reasoning`, `reasoning_content`, or `think_tags` for
    a `<think>` block in the content. Counts are -1 where the server gave none.
    """

    model: str
    outcome: Outcome
    finish_reason: str
    reasoning: str | None = None
    reasoning_source: str | None = None
    content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None
    prompt_tokens: int = -1
    completion_tokens: int = -1


class Dialect(Protocol):
    """One module of this package."""

    @property
    def NAME(self) -> str: ...

    @property
    def GIVES_TOKEN_IDS(self) -> bool:
        """Whether the server can say which ids it produced. Where not, they come from the target's tokenizer."""
        ...

    @property
    def WANTS_PROMPT_IDS(self) -> bool:
        """Whether it asks with the prompt as token ids: then target.path has to be set."""
        ...

    def request(self, ask: Ask) -> Request:
        """The question. `sampling.extra_body` is merged last, so it wins; of `chat_template_kwargs` in it, each key
        does."""
        ...

    def continuation(self, ask: Ask) -> Request | None:
        """The question for what comes after `ask.prompt_token_ids`, of at most `ask.sampling.max_tokens` tokens. None
        where the server takes no ids. `parse` reads its answer too, whose `token_ids` are the new ones alone."""
        ...

    def parse(self, body: dict[str, Any]) -> Completion:
        """Read the body of an HTTP 200. Raises Transient on an aborted answer or a body that is no completion."""
        ...

    def classify(self, status: int, headers: Mapping[str, str], body: str | bytes) -> ServerError:
        """The error that an answer with another HTTP status stands for, to be raised by the caller.

        BadRequest: this row is refused, never asked again. Overload, Transient: the row may be asked again.
        Mismatch: the server does not serve this model (any more); the row is not at fault, look at the server again.
        Unauthorized: no row will pass; stop and tell the operator.
        """
        ...

    def recognizes(self, models: Mapping[str, Any], metrics: str, headers: Mapping[str, str]) -> bool:
        """Whether a server that answers like this speaks this dialect (see `detect`)."""
        ...


def load(name: str) -> Dialect:
    """Raises SettingsError, listing the known ones, on an unknown name."""
    if name not in DIALECTS:
        known = ", ".join(DIALECTS)
        raise SettingsError(f"worker.dialect = {name!r}: no such dialect; known are {known}, and auto to detect it.")
    return cast(Dialect, importlib.import_module(DIALECTS[name]))


def detect(models: Mapping[str, Any], metrics: str, headers: Mapping[str, str], greeting: str = "") -> str | None:
    """Which dialect a server speaks, from its answers before any prompt was sent. None if nothing tells.

    `models` is the body of GET /v1/models, `metrics` the text of GET /metrics ("" if there is none), `headers` those of
    either answer, `greeting` the text of GET / ("" if not asked).
    """
    if greeting.startswith("Ollama"):
        return "ollama"
    return next((name for name in DIALECTS if load(name).recognizes(models, metrics, headers)), None)


def decode(raw: str | bytes) -> dict[str, Any]:
    """The JSON object in the body of an HTTP 200. Raises Transient on anything else: a proxy or server that broke.

    Half a surrogate pair, which JSON can hold and neither UTF-8 nor Arrow, becomes the replacement character.
    """
    try:
        body = json.loads(raw)
    except ValueError:
        body = None
    if not isinstance(body, dict):
        shown = start_of(raw)
        raise Transient(
            "the server answered 200 with a body that is no JSON object", status=200, body=shown, kind="unusable"
        )
    written = raw if isinstance(raw, bytes) else raw.encode(errors="surrogatepass")
    # Three fixed texts are found, or not, in a thirtieth of the pattern's time, and clear nearly every answer.
    suspect = any(mark in written for mark in (b"\\ud", b"\\uD", b"\xed")) and _SURROGATES.search(written)
    return cast(dict[str, Any], _whole(body) if suspect else body)


def _whole(value: object) -> object:
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, list):
        return [_whole(one) for one in cast(list[object], value)]
    if isinstance(value, dict):
        return {key: _whole(one) for key, one in cast(dict[str, object], value).items()}
    return value


def start_of(raw: str | bytes, limit: int = 300) -> str:
    """The start of a body, for messages. A server may quote the key that it was sent."""
    raw = raw[: 4 * limit]
    text = redact(raw.decode(errors="replace") if isinstance(raw, bytes) else raw)
    return text if len(text) <= limit else text[:limit] + "..."
