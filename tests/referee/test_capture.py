"""A drafter is trained on what real vLLM hands out, beside a server that generates: it learns what it learns here."""

from __future__ import annotations

import contextlib
import json
import shlex
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoTokenizer

from draftfleet.records import Prompt, Sample
from draftfleet.runs import Run
from draftfleet.settings import Settings, load
from draftfleet.storage import open_storage
from trainer import targets
from trainer.targets import Captured, Row
from trainer.targets.vllm.command import command
from trainer.train import train

pytestmark = [pytest.mark.referee, pytest.mark.timeout(2400)]

RTOL = 1e-5
"""Of the largest value. Two float32 programs that add in another order differ by about 1e-6 of it."""

SPOOL_GB = 0.0016
"""Two rows of the longest."""

QUESTIONS = [
    "Sort these numbers: 8 3 5 1.", "What is 14 plus 27?", "Repeat the word harbour four times, then stop.",
    "What is the capital of France?", "Compute 94 + 44.", "Which day comes after Monday?", "Compute 7 * 8.",
    "What is the opposite of open?",
]  # fmt: skip

StartVllm = Callable[..., AbstractContextManager[httpx.Client]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("spool")


@pytest.fixture(scope="module")
def make_settings(target: Path, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Settings]:
    storage = tmp_path_factory.mktemp("storage")

    def make(**flags: Any) -> Settings:
        knobs = {
            "run": "r",
            "storage.url": str(storage),
            "storage.min_free_gb": 0,
            "target.path": str(target),
            "target.model": "tiny-target",
            "trainer.dtype": "float32",
            "trainer.device": "cpu",
            "trainer.max_steps": 20,
            "trainer.log_steps": 1,
            "trainer.batch_tokens": 400,
            "trainer.max_length": 200,
            "trainer.lr": 1e-3,
            "capture.folder": str(folder),
            "capture.spool_gb": SPOOL_GB,
        }
        return load(flags=knobs | {name.replace("__", "."): value for name, value in flags.items()})

    return make


@pytest.fixture(scope="module")
def server(start_vllm: StartVllm, make_settings: Callable[..., Settings]) -> Iterator[str]:
    """Served with the options that `draftfleet capture-command` prints, but for the connector, which needs a GPU."""
    words = shlex.split(command(make_settings()))
    transfer = json.loads(words[words.index("--kv-transfer-config") + 1])
    transfer |= {"kv_connector": "CpuHiddenStatesConnector", "kv_connector_module_path": "cpu_hidden_states"}
    speculation = words[words.index("--speculative-config") + 1]
    options = ["--speculative-config", speculation, "--kv-transfer-config", json.dumps(transfer)]
    with start_vllm("--no-enable-prefix-caching", *options) as client:
        yield str(client.base_url)


@pytest.fixture(scope="module")
def samples(target: Path, plain_vllm: httpx.Client, make_settings: Callable[..., Settings]) -> list[Row]:
    """A run of answers of the target, made by the server that generates."""
    tokenizer = AutoTokenizer.from_pretrained(target)
    run = Run.create(open_storage(make_settings().storage), "r", {"target.model": "tiny-target"}, {})
    made: list[Sample] = []
    for number, question in enumerate(QUESTIONS):
        message = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=True)["input_ids"]
        ids, text = generate(plain_vllm, prompt, 60 + 10 * number)
        made.append(
            Sample(
                run_id=run.run_id,
                run="r",
                batch="train-000000",
                row_key=f"q{number}",
                prompt_id=f"q{number}",
                split="train",
                messages=message,
                outcome="ok",
                content=text,
                prompt_token_ids=prompt,
                token_ids=ids,
                ids_source="engine",
                completion_tokens=len(ids),
            )
        )
    run.write_prompts("train-000000", [Prompt(one.row_key, "train", one.messages) for one in made])
    run.commit("train-000000", made)
    run.seal({})
    return [Row(one.row_key, torch.tensor(one.prompt_token_ids + one.token_ids), mask(one)) for one in made]


def mask(sample: Sample) -> torch.Tensor:
    return torch.tensor([False] * len(sample.prompt_token_ids) + [True] * len(sample.token_ids))


def generate(client: httpx.Client, prompt: list[int], max_tokens: int) -> tuple[list[int], str]:
    body = {"model": "tiny-target", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0.7, "seed": 1}
    answer = client.post("/v1/completions", json=body | {"return_token_ids": True}).raise_for_status().json()
    return answer["choices"][0]["token_ids"], answer["choices"][0]["text"]


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max())


def test_states_from_the_server_are_those_of_the_target_in_this_process(
    server: str,
    samples: list[Row],
    make_settings: Callable[..., Settings],
    folder: Path,
    figure: Callable[[str, object], None],
) -> None:
    batches = [samples[:3], samples[3:]]
    theirs, ours = (
        [one for batch in captured for one in batch]
        for captured in (
            capture(make_settings(trainer__target="vllm", capture__servers=[server]), batches),
            capture(make_settings(), batches),
        )
    )

    assert [one.row.key for one in theirs] == [row.key for row in samples]
    worst = max(
        max(difference(a.hidden, b.hidden), difference(a.last, b.last)) for a, b in zip(theirs, ours, strict=True)
    )
    figure("states captured from vLLM against those in process, largest relative difference", worst)
    assert worst <= RTOL
    assert list(folder.iterdir()) == []


def capture(settings: Settings, batches: list[list[Row]]) -> list[list[Captured]]:
    return list(targets.load(settings, None, torch.device("cpu")).capture(batches))


def test_a_training_on_captured_states_has_the_losses_of_one_in_this_process_beside_generation(
    server: str,
    samples: list[Row],
    plain_vllm: httpx.Client,
    make_settings: Callable[..., Settings],
    folder: Path,
    figure: Callable[[str, object], None],
) -> None:
    over, generated, largest = threading.Event(), list[int](), [0]

    def generating() -> None:
        while not over.is_set():
            generated.extend(generate(plain_vllm, samples[0].ids[:20].tolist(), 32)[0])

    def watching() -> None:
        while not over.is_set():
            largest.append(size_of(folder))
            time.sleep(0.002)

    threads = [threading.Thread(target=work) for work in (generating, watching)]
    for thread in threads:
        thread.start()
    began = time.monotonic()
    try:
        knobs = {"trainer__target": "vllm", "capture__servers": [server], "trainer__drafter": "captured"}
        assert train(make_settings(**knobs), threading.Event())
    finally:
        over.set()
        for thread in threads:
            thread.join()
    seconds = time.monotonic() - began
    assert train(make_settings(trainer__drafter="in-process"), threading.Event())

    theirs, ours = (losses(make_settings(), name) for name in ("captured", "in-process"))
    worst = max(abs(a - b) / b for a, b in zip(theirs, ours, strict=True))
    figure("losses on states captured from vLLM against in process, largest relative difference", worst)
    figure("tokens generated beside a training of so many seconds", f"{len(generated)} in {seconds:.1f} s")
    figure("most bytes in the spool, of its bound", f"{max(largest)} of {SPOOL_GB * 1e9:.0f}")
    assert len(ours) == 20
    assert ours[-1] < ours[0]
    assert worst <= 1e-4
    assert generated
    assert 0 < max(largest) <= SPOOL_GB * 1e9
    assert list(folder.iterdir()) == []


def losses(settings: Settings, drafter: str) -> list[float]:
    board = Run.open(open_storage(settings.storage), "r").drafter_dir(drafter) / "tensorboard"
    return [one.value for one in EventAccumulator(str(board)).Reload().Scalars("loss")]


def size_of(folder: Path) -> int:
    total = 0
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):
            total += path.stat().st_size
    return total
