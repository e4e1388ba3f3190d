"""The forms of files that are read: how each is recognised, and the responses in one of its rows.

A row may hold several responses. One that was understood and cannot be a sample is a Refused in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from draftfleet.errors import DataError
from draftfleet.records import Prompt, Sample
from producer.import_data.responses import (
    REASONING,
    TOKEN_IDS,
    Fields,
    Refused,
    Response,
    an_object,
    first,
    is_assistant,
    names_in,
    parsed_list,
    response,
)
from producer.prompts import SYSTEM, Rules, read_prompt
from producer.shapes import Malformed, Rejected, Row

Found = list[Response | Refused]

RULES = Rules(column=None, split_column=None, heldout=0.0)
ROLLOUTS = ("rollout_results", "inference_results")
CONVERSATION = ("messages", "conversations", "conversation")
ANSWERS = ("response", "completion", "output", "generated_text", "answer", "content")
"""Columns that hold an answer beside its prompt: a text, an assistant's message, or a whole chat completion."""


@dataclass(frozen=True, slots=True)
class Form:
    """`is_met_by` looks at the columns alone."""

    is_met_by: Callable[[Row], bool]
    responses: Callable[[Row], Found]


def read(row: Row, form: str | None) -> Found:
    """What a row holds; of the form that it has, where none is forced. Raises Malformed, or Unknown."""
    if form is not None and not FORMS[form].is_met_by(row):
        raise Unknown(f"it has not the columns of {form}")
    return FORMS[form or form_of(row)].responses(row)


def form_of(row: Row) -> str:
    """The first form that the row meets. Raises Unknown."""
    for name, form in FORMS.items():
        if form.is_met_by(row):
            return name
    raise Unknown("it has the columns of no known form")


class Unknown(Malformed):
    """A row of no known form: where no row has one, the file is none of ours."""


def check(form: str | None) -> None:
    """Raises DataError on a form that is not known."""
    if form is not None and form not in FORMS:
        raise DataError(f"--format {form}: known are {', '.join(FORMS)}. Left out, it is found by itself.")


def no_form(file: str, columns: list[str]) -> DataError:
    return DataError(
        f"{file} has none of the known forms: {', '.join(FORMS)}. Its columns: {', '.join(columns) or 'none'}. "
        "docs/import-data.md shows each form; rename the columns, or force one with --format."
    )


def _metadata(row: Row) -> dict[str, Any]:
    return an_object(row.get("metadata")) or {}


def _samples(row: Row) -> Found:
    """Our own, as a shard or an export holds them."""
    try:
        known = {name: value for name, value in row.items() if name in Sample.__slots__}
        sample = Sample.from_row(
            {**known, "messages": [_with_all_fields(one) for one in parsed_list(row.get("messages"), "messages")]}
        )
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise Malformed(f"it is no sample: {error}") from None
    if sample.outcome == "failed":
        return [Refused("failed", str(sample.error))]
    if sample.turns:
        return [Refused("several turns", "a sample of a conversation that was asked turn by turn")]
    asked = Prompt(sample.prompt_id, sample.split, sample.messages, sample.tools)
    ids = sample.token_ids if sample.ids_source == "engine" else None
    return [
        Response(
            names=(sample.row_key, sample.prompt_id),
            asked=asked,
            content=sample.content,
            reasoning=sample.reasoning,
            reasoning_source=sample.reasoning_source,
            tool_calls=sample.tool_calls,
            finish_reason=sample.finish_reason,
            prompt_token_ids=sample.prompt_token_ids if ids else None,
            token_ids=ids,
            completion_tokens=sample.completion_tokens,
            model=sample.model or None,
        )
    ]


def _with_all_fields(message: dict[str, Any]) -> dict[str, Any]:
    names = ("role", "content", "reasoning_content", "tool_call_id", "name", "tool_calls", "extra")
    return {name: message.get(name) for name in names}


def _datatrove(row: Row) -> Found:
    """A document with its rollouts. One that was skipped has none."""
    metadata = _metadata(row)
    rollouts = parsed_list(first((row, metadata), ROLLOUTS), ROLLOUTS[0])
    text = row.get("text")
    asked = _asked({"messages" if isinstance(text, list) else "prompt": text, **_beside(row), **_beside(metadata)})
    if not rollouts:
        return [Refused("no answer", "a document without rollouts")]
    found: Found = []
    for rollout in rollouts:
        fields = {"text": rollout} if isinstance(rollout, str) else an_object(rollout)
        if fields is None or ("text" not in fields and "error" not in fields):
            raise Malformed("a rollout is neither a text nor an object with text")
        if fields.get("error") and not fields.get("text"):
            found.append(Refused("error", str(fields["error"])[:80]))
        else:
            found.append(_tried(fields, [], names_in(row), asked))
    return found


def _speculators(row: Row) -> Found:
    """One row for each thing that the target said: what went before it has a loss mask of 0."""
    metadata = _metadata(row)
    ids, mask = (parsed_list(row[name], name) for name in ("input_ids", "loss_mask"))
    if len(ids) != len(mask) or any(one not in (0, 1) for one in mask):
        raise Malformed(
            f"{len(ids)} input_ids and a loss_mask of {len(mask)} are no pair, or the mask is not of 0 and 1"
        )
    if any(type(one) is not int for one in ids):
        raise Malformed("input_ids holds something else than whole numbers")
    start = mask.index(1) if 1 in mask else len(mask)
    if 0 in mask[start:]:
        return [Refused("several turns", "its loss mask has more than one piece: what the target was given is unknown")]
    fields = {"prompt_token_ids": ids[:start], "token_ids": ids[start:]}
    return [_tried(fields, [metadata], (), None)]


def _error_row(row: Row) -> Found:
    """The errors file beside an output."""
    return [Refused("error", str(_metadata(row).get("error"))[:80])]


def _specforge(row: Row) -> Found:
    """A conversation answered turn by turn. Its `model`, if there, is a column of the source."""
    if row["status"] != "success":
        return [Refused(f"status {row['status']}", str(row.get("error"))[:80])]
    return _of_conversation(row, model=False)


def _conversations(row: Row) -> Found:
    return _of_conversation(row)


def _of_conversation(row: Row, *, model: bool = True) -> Found:
    """The answer is the last message."""
    column = next(name for name in CONVERSATION if row.get(name) is not None)
    messages = parsed_list(row[column], column)
    metadata = _metadata(row)
    if error := first((metadata, row), ("error",)):
        return [Refused("error", str(error)[:80])]
    if not messages or not is_assistant(messages[-1]):
        return [Refused("no answer", "the last message is not the assistant's")]
    if len(messages) > 1 and is_assistant(messages[-2]):
        raise Malformed("it ends with two messages of the assistant")
    answer = an_object(messages[-1]) or {}
    asked = _asked({"messages": messages[:-1], **_beside(row)})
    return [_tried(answer, [row, metadata], names_in(row), asked, model=model)]


def _beside_prompt(row: Row) -> Found:
    """An answer in a column of its own; the prompt is a name of ours, or what the producer would read of the row."""
    if error := first((row,), ("error",)):
        return [Refused("error", str(error)[:80])]
    names = names_in(row)
    try:
        asked = _asked({name: value for name, value in row.items() if name not in (*ANSWERS, "split")})
    except Malformed:
        if not names:
            raise
        asked = None
    metadata = _metadata(row)
    name = next((name for name in ANSWERS if row.get(name) is not None), None)
    value: Any = None if name is None else row[name]
    completion = _completion(row) or _completion(an_object(value) or {})
    if completion is not None:
        return _choices(completion, names, asked)
    message = an_object(value) or {"content": value}
    return [_tried(message, [row, metadata], names, asked)]


def _completion(fields: Fields) -> dict[str, Any] | None:
    """A chat completion as a server answered it, also as the body in a line of the batch API."""
    body = an_object(fields.get("body")) or fields
    return dict(body) if isinstance(body.get("choices"), list) and body["choices"] else None


def _choices(body: dict[str, Any], names: tuple[str, ...], asked: Prompt | None) -> Found:
    choices = [an_object(one) for one in body["choices"]]
    shared = body if len(choices) == 1 else {key: value for key, value in body.items() if key != "usage"}
    found: Found = []
    for choice in choices:
        if choice is None:
            raise Malformed("a choice is no object")
        message = an_object(choice.get("message")) or {"content": choice.get("text")}
        found.append(_tried(message, [choice, shared], names, asked))
    return found


def _tried(
    message: Fields, around: list[Fields], names: tuple[str, ...], asked: Prompt | None, *, model: bool = True
) -> Response | Refused:
    try:
        return response(message, around, names=names, asked=asked, model=model)
    except Refused as why:
        return why


def _asked(row: Row) -> Prompt:
    """As the producer reads it. Raises Malformed."""
    try:
        return read_prompt(row, RULES)
    except Rejected as why:
        raise Malformed(str(why)) from None


def _beside(row: Fields) -> dict[str, Any]:
    return {name: row[name] for name in (*SYSTEM, "tools") if row.get(name) is not None}


def _has(row: Row, *names: str) -> bool:
    return any(row.get(name) is not None for name in names)


def _is_answered(row: Row) -> bool:
    """Whether it holds a conversation that ends with the assistant's message."""
    try:
        messages = parsed_list(first((row,), CONVERSATION), "messages")
    except Malformed:
        return False
    return bool(messages) and is_assistant(messages[-1])


FORMS: Mapping[str, Form] = {
    "samples": Form(lambda row: _has(row, "row_key") and _has(row, "ids_source") and _has(row, "outcome"), _samples),
    "datatrove": Form(lambda row: _has(row, *ROLLOUTS) or _has(_metadata(row), *ROLLOUTS), _datatrove),
    "speculators": Form(lambda row: _has(row, "input_ids") and _has(row, "loss_mask"), _speculators),
    "specforge": Form(lambda row: _has(row, "conversations") and isinstance(row.get("status"), str), _specforge),
    "responses": Form(
        lambda row: _has(row, *ANSWERS, "choices") or (_has(row, *REASONING, *TOKEN_IDS) and not _is_answered(row)),
        _beside_prompt,
    ),
    "conversations": Form(lambda row: _has(row, *CONVERSATION), _conversations),
    "errors": Form(lambda row: _has(_metadata(row), "error"), _error_row),
}
"""In the order in which they are tried."""
