"""Bytes that a token takes in the storage: of an answer in its sample shard, of a prompt in both its shards.

    python benchmarks/shard_bytes.py --tokenizer FOLDER

Text is the descriptions of all Python packages that are installed here: English with lists and code, about what
assistants write. It is cut into answers and prompts, tokenized, and put into shards as a worker puts them: text, ids of
prompt and answer, and all other columns. What each part takes is the difference that it makes.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import distributions
from pathlib import Path

from draftfleet import tokens
from draftfleet.outcomes import Counts
from draftfleet.records import Prompt, Sample, prompt_id
from draftfleet.shards import pack_prompts, pack_samples

TINY = Path(__file__).parents[1] / "examples/tiny-target"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, default=TINY)
    parser.add_argument("--answer-tokens", type=int, default=1800)
    parser.add_argument("--prompt-tokens", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--shards", type=int, default=8)
    knobs = parser.parse_args()
    tokenizer = tokens.load(knobs.tokenizer)
    ids = tokenizer.encode("\n".join(_texts()))
    need = knobs.batch_size * (knobs.answer_tokens + knobs.prompt_tokens)
    num_shards = min(knobs.shards, len(ids) // need)
    assert num_shards, f"{len(ids)} tokens of text are too few for one shard"
    answer = prompt = whole = 0
    for number in range(num_shards):
        part = ids[number * need : (number + 1) * need]
        samples, prompts = _rows(tokenizer, part, knobs)
        empty = [replace(sample, content="", token_ids=[]) for sample in samples]
        bare = [replace(sample, messages=[], prompt_token_ids=[]) for sample in empty]
        full, without, least = (len(pack_samples(rows, Counts.of(rows), "r")) for rows in (samples, empty, bare))
        answer += full - without
        prompt += without - least + len(pack_prompts(prompts))
        whole += full
    rows = num_shards * knobs.batch_size
    print(
        json.dumps(
            {
                "vocabulary": tokenizer.vocab_size,
                "text_tokens": len(ids),
                "shards": num_shards,
                "bytes_per_completion_token": round(answer / rows / knobs.answer_tokens, 2),
                "bytes_per_prompt_token": round(prompt / rows / knobs.prompt_tokens, 2),
                "shard_bytes_per_completion_token": round(whole / rows / knobs.answer_tokens, 2),
            }
        )
    )


def _texts() -> Iterator[str]:
    seen: set[str] = set()
    for one in sorted(distributions(), key=lambda found: str(found.metadata["Name"])):
        text = str(one.metadata.get_payload() or one.metadata.get("Description") or "")
        if text not in seen:
            seen.add(text)
            yield text


def _rows(
    tokenizer: tokens.TargetTokenizer, ids: list[int], knobs: argparse.Namespace
) -> tuple[list[Sample], list[Prompt]]:
    samples: list[Sample] = []
    prompts: list[Prompt] = []
    size = knobs.prompt_tokens + knobs.answer_tokens
    for start in range(0, len(ids), size):
        asked, answered = ids[start : start + knobs.prompt_tokens], ids[start + knobs.prompt_tokens : start + size]
        messages = [{"role": "user", "content": tokenizer.decode(asked)}]
        prompt = Prompt(prompt_id(messages, None), "train", messages)
        prompts.append(prompt)
        samples.append(
            Sample(
                run_id="0" * 32,
                run="bytes",
                batch="train-000000",
                row_key=prompt.row_key,
                prompt_id=prompt.prompt_id,
                split="train",
                messages=messages,
                outcome="ok",
                finish_reason="stop",
                content=tokenizer.decode(answered),
                prompt_token_ids=asked,
                token_ids=answered,
                ids_source="engine",
                prompt_tokens=len(asked),
                completion_tokens=len(answered),
                model="target",
                server="http://127.0.0.1:8000",
                dialect="vllm",
            )
        )
    return samples, prompts


if __name__ == "__main__":
    main()
