"""Record what a real server says, as the examples of its dialect: one file per question, in a folder of its name.

    python tests/contracts/dialects/record.py http://127.0.0.1:8000 vllm

The server serves examples/tiny-target with its reasoning parser, for vLLM with --max-model-len 1024. Addresses and file
names of this machine are left out of what is kept.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from draftfleet.records import Prompt
from draftfleet.settings import Sampling
from workers import dialects
from workers.dialects import Ask

HERE = Path(__file__).parent
KEPT_HEADERS = ("content-type", "server", "x-request-id", "retry-after")
SUM = [{"role": "user", "content": "What is 3 + 4?"}]
LONG = [{"role": "user", "content": "count to ten and " * 300}]


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


def main(url: str, name: str) -> None:
    model = ask(f"{url}/v1/models", None)["body"]["data"][0]["id"]
    dialect = dialects.load(name)
    chat = f"{url}/v1/chat/completions"

    def request(messages: list[dict[str, Any]], asked: str = model, **sampling: Any) -> dict[str, Any]:
        prompt = Prompt(prompt_id="0" * 32, split="train", messages=messages)
        knobs = Sampling(**{"max_tokens": 256, "temperature": 0, "thinking": True, **sampling})
        return dialect.request(Ask(model=asked, messages=prompt.messages, sampling=knobs)).body

    questions: dict[str, tuple[str, dict[str, Any] | None]] = {
        "models": (f"{url}/v1/models", None),
        "metrics": (f"{url}/metrics", None),
        "thinking": (chat, request(SUM)),
        "not-thinking": (chat, request(SUM, thinking=False)),
        "cut-in-thought": (chat, request(SUM, max_tokens=8)),
        "cut-in-content": (chat, request(SUM, max_tokens=34)),
        "other-model": (chat, request(SUM, asked="other")),
        "too-long": (chat, request(LONG)),
        "no-messages": (chat, {"model": model}),
        "unknown-field": (chat, {**request(SUM), "no_such_field": 1}),
    }
    (HERE / name).mkdir(exist_ok=True)
    for question, (address, body) in questions.items():
        answer = ask(address, body)
        if question == "metrics" and answer["status"] == 200:
            lines = str(answer["body"]).splitlines()
            answer["body"] = "\n".join(line for line in lines if line.startswith(f"{name}:num_requests")) + "\n"
        if question == "models":
            for entry in answer["body"]["data"]:
                entry |= {key: "tiny" for key in ("id", "root") if key in entry}
        shown = None if question == "too-long" else body
        text = json.dumps({"request": shown, **answer}, indent=1, ensure_ascii=False)
        (HERE / name / f"{question}.json").write_text(text.replace(model, "tiny") + "\n")
        print(name, question, answer["status"])


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
