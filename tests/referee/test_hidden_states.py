"""The states that our drafters are trained on are those that vLLM feeds them when it serves."""

import fcntl
import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoTokenizer

from draftfleet.settings import Settings, load
from trainer import algorithms, targets
from trainer.export import vllm as vllm_format
from trainer.export.folder import Verifier
from trainer.targets import Captured, Row, Target

pytestmark = [pytest.mark.referee, pytest.mark.timeout(1200)]

LAYERS = list(range(8))  # every layer of the tiny target, as A ids
RTOL = 1e-5
"""Of the largest value of a layer. Two float32 programs that add in another order differ by about 1e-6 of it."""

QUESTIONS = ["Sort these numbers: 8 3 5 1.", "What is 14 plus 27?", "Repeat the word harbour four times, then stop."]


@pytest.fixture(scope="module")
def rows(target: Path) -> list[Row]:
    tokenizer = AutoTokenizer.from_pretrained(target)
    rows: list[Row] = []
    for number, question in enumerate(QUESTIONS):
        message = [{"role": "user", "content": question}]
        ids = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=True)["input_ids"]
        ids = torch.tensor(ids + tokenizer("<think>\n" + question * (number + 1))["input_ids"])
        rows.append(Row(str(number), ids, torch.ones(len(ids), dtype=torch.bool)))
    return rows


@pytest.fixture(scope="module")
def settings(target: Path) -> Settings:
    return load(flags={"target.path": str(target), "trainer.dtype": "float32"})


@pytest.fixture(scope="module")
def loaded(settings: Settings) -> Target:
    return targets.load(settings, LAYERS, torch.device("cpu"))


@pytest.fixture(scope="module")
def ours(rows: list[Row], loaded: Target) -> list[Captured]:
    """Captured as in training: one padded batch, float32."""
    return next(iter(loaded.capture([rows])))


@pytest.fixture(scope="module")
def exported_layers(settings: Settings, loaded: Target) -> dict[str, list[int]]:
    """The layers of `loaded`, as config.json of an export names them."""
    config = vllm_format.config(algorithms.configure(settings, loaded), "float32", Verifier(""))
    return {name: ids for name, ids in config.items() if name == "eagle_aux_hidden_state_layer_ids"}


@pytest.fixture(scope="module")
def theirs(
    rows: list[Row],
    exported_layers: dict[str, list[int]],
    start_vllm: Callable[..., AbstractContextManager[httpx.Client]],
    tmp_path_factory: pytest.TempPathFactory,
) -> list[Tensor]:
    """What vLLM extracts, (T, 8, D) a row, when it is asked for the layers as our exporter writes them."""
    folder = tmp_path_factory.mktemp("hidden-states")
    speculation = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": exported_layers},
    }
    transfer = {
        "kv_connector": "CpuHiddenStatesConnector",
        "kv_connector_module_path": "cpu_hidden_states",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": str(folder)},
    }
    options = ("--speculative-config", json.dumps(speculation), "--kv-transfer-config", json.dumps(transfer))
    with start_vllm("--no-enable-prefix-caching", *options) as client:
        return [_extract(client, row) for row in rows]


def _extract(client: httpx.Client, row: Row) -> Tensor:
    body = {"model": "tiny-target", "prompt": row.ids.tolist(), "max_tokens": 1, "temperature": 0}
    answer = client.post("/v1/completions", json=body).raise_for_status().json()
    path = answer["kv_transfer_params"]["hidden_states_path"]
    with Path(f"{path}.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)  # the server holds it until the file is whole
    extracted = load_file(path)
    assert extracted["token_ids"].tolist() == row.ids.tolist()
    return extracted["hidden_states"]


def difference(a: Tensor, b: Tensor) -> float:
    """Largest difference, in parts of the largest value."""
    return float((a - b).abs().max() / b.abs().max())


def per_layer(captured: Captured) -> Tensor:
    """(T, 8, D), as vLLM has them."""
    return captured.hidden.unflatten(-1, (len(LAYERS), -1))


def test_vllm_hands_out_the_states_that_we_train_on(
    ours: list[Captured], theirs: list[Tensor], figure: Callable[[str, object], None]
) -> None:
    worst = {
        layer: max(difference(b[:, layer], per_layer(a)[:, layer]) for a, b in zip(ours, theirs, strict=True))
        for layer in LAYERS
    }

    figure("hidden states of all layers, ours against vLLM's, largest relative difference", max(worst.values()))
    assert {layer: value for layer, value in worst.items() if not value <= RTOL} == {}


def test_the_state_after_the_last_layer_is_the_one_before_the_final_norm(
    ours: list[Captured], theirs: list[Tensor], figure: Callable[[str, object], None]
) -> None:
    worst = max(difference(b[:, -1], a.last) for a, b in zip(ours, theirs, strict=True))

    figure("last hidden state before the final norm, largest relative difference", worst)
    assert worst <= RTOL


def test_a_layer_id_that_is_off_by_one_is_seen(
    ours: list[Captured], theirs: list[Tensor], figure: Callable[[str, object], None]
) -> None:
    """Both ways, at every layer, in every row. The tolerance is a thousand times tighter than what it tells apart."""
    closest = min(
        min(difference(b[:, layer], per_layer(a)[:, layer + 1]), difference(b[:, layer + 1], per_layer(a)[:, layer]))
        for a, b in zip(ours, theirs, strict=True)
        for layer in LAYERS[:-1]
    )

    figure("hidden states one layer off, smallest relative difference", closest)
    assert closest > 1000 * RTOL
