"""Record what a real server says, as the examples of its dialect: one file per question, in a folder of its name.

    python tests/contracts/dialects/record.py http://127.0.0.1:8000 vllm

The server serves examples/tiny-target with its reasoning parser, for vLLM with --max-model-len 1024 and a tool parser.
Addresses and file names of this machine are left out of what is kept.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from draftfleet.errors import Mismatch
from draftfleet.settings import Sampling
from draftfleet.tokens import load
from workers import dialects
from workers.dialects import Ask

HERE = Path(__file__).parent
TOKENIZER = load(HERE.parents[2] / "examples/tiny-target")
KEPT_HEADERS = ("content-type", "server", "x-request-id", "retry-after")
SUM: list[dict[str, Any]] = [{"role": "user", "content": "What is 3 + 4?"}]
LONG: list[dict[str, Any]] = [{"role": "user", "content": "count to ten and " * 300}]
CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 3, "b": 4}'}}
CALLED = [
    *SUM,
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "7"},
]
THOUGHT = [*SUM, {"role": "assistant", "content": "The sum is 7.", "reasoning_content": "3 + 4 = 7."}, *SUM]
NUMBERS = {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": NUMBERS}}]
KNOBS: dict[str, Any] = {"temperature": 0.7, "top_p": 0.95, "top_k": 1, "min_p": 0.01}
PENALTIES: dict[str, Any] = {"presence_penalty": 0.01, "frequency_penalty": 0.01, "repetition_penalty": 1.01}


def ask(url: str, body: dict[str, Any] | None) -> dict[str, Any]:
    data = None if body is None else json.dumps(body).encode()
    try:
        response = urlopen(Request(url, data, {"Content-Type": "application/json"}), timeout=120)
    except HTTPError as error:
        response = error
    raw = response.read()
    headers = {key: value for key, value in response.headers.items() if key.lower() in KEPT_HEADERS}
    try:
        answer = json.loads(raw)
    except ValueError:
        answer = raw.decode()
    return {"status": response.status, "headers": headers, "body": answer}


def questions(name: str, model: str) -> Mapping[str, tuple[str, dict[str, Any] | None]]:
    """Path and body of each. Those that this dialect refuses or does not have are left out."""
    dialect = dialects.load(name)

    def of(messages: list[dict[str, Any]], asked: str = model, **sampling: Any) -> Ask:
        tools = sampling.pop("tools", None)
        knobs = Sampling(**{"max_tokens": 256, "temperature": 0, "thinking": True, **sampling})
        ids = TOKENIZER.prompt_ids(messages, template_kwargs=knobs.template_kwargs)
        return Ask(model=asked, messages=messages, sampling=knobs, tools=tools, seed=7, prompt_token_ids=ids)

    def request(*wanted: Any, **sampling: Any) -> tuple[str, dict[str, Any]]:
        return dialect.request(of(*wanted, **sampling))

    asked: dict[str, tuple[str, dict[str, Any] | None]] = {
        "models": ("/v1/models", None),
        "metrics": ("/metrics", None),
        "thinking": request(SUM),
        "not-thinking": request(SUM, thinking=False),
        "cut-in-thought": request(SUM, max_tokens=8),
        "cut-in-content": request(SUM, max_tokens=34),
        "other-model": request(SUM, "other"),
        "too-long": request(LONG),
        "no-messages": (request(SUM)[0], {"model": model}),
        "unknown-field": request(SUM, extra_body={"no_such_field": 1}),
        "called": request(CALLED, tools=TOOLS),
        "history": request(THOUGHT),
    }
    given = of(SUM)
    begun = TOKENIZER.encode("<think>\nThe numbers are 3")
    rest = dialect.continuation(
        Ask(
            model=model,
            messages=SUM,
            sampling=given.sampling,
            prompt_token_ids=[*(given.prompt_token_ids or []), *begun],
        )
    )
    if rest is not None:
        asked["continuation"] = rest
    try:
        asked["sampling"] = request(SUM, **KNOBS, **PENALTIES, stop=["**"], reasoning_effort="low")
    except Mismatch:
        asked["sampling"] = request(SUM, temperature=0.7, top_p=0.01, reasoning_effort="low")
    return asked


def main(url: str, name: str) -> None:
    model = ask(f"{url}/v1/models", None)["body"]["data"][0]["id"]
    (HERE / name).mkdir(exist_ok=True)
    for question, (path, body) in questions(name, model).items():
        answer = ask(url + path, body)
        if question == "metrics" and answer["status"] == 200:
            lines = str(answer["body"]).splitlines()
            kept = [line for line in lines if line.startswith((f"{name}:num_requests", f"{name}:requests"))]
            answer["body"] = "\n".join(kept) + "\n"
        if question == "models":
            for entry in answer["body"]["data"]:
                entry |= {key: "tiny" for key in ("id", "root") if key in entry}
        shown = None if question == "too-long" else body
        text = json.dumps({"path": path, "request": shown, **answer}, indent=1, ensure_ascii=False)
        (HERE / name / f"{question}.json").write_text(text.replace(model, "tiny") + "\n")
        print(name, question, answer["status"])


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
