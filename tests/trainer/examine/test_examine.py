"""Wrong layers, wrong norms, wrong ids: each put in for real, and each found by its name."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from draftfleet.errors import SettingsError
from draftfleet.records import Prompt, Sample
from draftfleet.runs import Run
from draftfleet.settings import Settings, load
from draftfleet.storage import FileStorage
from trainer import examine
from trainer.targets import Captured, Row, hf
from trainer.targets.hf import HfTarget
from workers.doctor import doctor_of_target

TINY = str(Path(__file__).parents[3] / "examples" / "tiny-target")
ADVICE = "docs/targets.md"

Change = Callable[[HfTarget, list[Captured]], list[Captured]]


def settings_of(folder: Path, **flags: Any) -> Settings:
    knobs = {"target.path": TINY, "storage.url": str(folder), "trainer.layers": [2, 3, 5], "trainer.device": "cpu"}
    return load(flags=knobs | {name.replace("__", "."): value for name, value in flags.items()})


def found(settings: Settings) -> dict[str, list[dict[str, Any]]]:
    by_check: dict[str, list[dict[str, Any]]] = {}
    for one in examine.look(settings):
        by_check.setdefault(one["check"], []).append(one)
    return by_check


def faults(findings: dict[str, list[dict[str, Any]]]) -> dict[str, str]:
    """The first of each check."""
    return {
        check: next(one["found"] for one in some if one["level"] == "fault")
        for check, some in findings.items()
        if any(one["level"] == "fault" for one in some)
    }


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """The target hf with a fault put in: other layers than asked for, or what it captured changed."""

    def make(*, off: int = 0, change: Change = lambda _, captured: captured, ids_off: int = 0) -> None:
        def load_broken(settings: Settings, layers: list[int], device: torch.device) -> HfTarget:
            target = real(settings, [layer + off for layer in layers], device)
            target.layers = layers
            capture = target.capture

            def captured(batches: Iterable[list[Row]]) -> Iterator[list[Captured]]:
                for batch in batches:
                    [some] = capture([[replace(row, ids=(row.ids + ids_off) % 2048) for row in batch]])
                    said = [replace(one, row=row) for one, row in zip(some, batch, strict=True)]
                    yield change(target, said)

            forward = target.forward

            def heard(ids: Tensor, *rest: Any, **inputs: Any) -> tuple[Tensor, Tensor]:
                target.layers, had = [layer + off for layer in layers], target.layers
                try:
                    return forward(ids, *rest, **inputs)
                finally:
                    target.layers = had

            target.forward = heard
            target.capture = captured
            return target

        real = hf.load
        monkeypatch.setattr(hf, "load", load_broken)

    return make


def test_a_sound_target_has_no_fault_and_its_layers_are_told_by_both_their_names(tmp_path: Path) -> None:
    findings = found(settings_of(tmp_path))

    assert faults(findings) == {}
    assert [one["values"]["nearest"] for one in findings["layers"]] == [2, 3, 5]
    assert "layer 5 is hidden_states[6] of Hugging Face" in findings["layers"][2]["found"]
    assert findings["samples"][0]["level"] == "skipped"
    assert {one["level"] for check in ("ends", "last", "layers") for one in findings[check]} == {"ok"}


@pytest.mark.parametrize("layers", [[0, 3, 7]])
@pytest.mark.parametrize("dtype", ["bfloat16"])
def test_the_first_and_the_last_layer_and_another_precision_are_no_faults(
    layers: list[int], dtype: str, tmp_path: Path
) -> None:
    assert faults(found(settings_of(tmp_path, trainer__layers=layers, trainer__dtype=dtype))) == {}


@pytest.mark.parametrize(
    ("off", "said"), [(1, "off by one, too late"), (-1, "off by one, too early"), (2, "off by +2")]
)
def test_layers_that_are_shifted_are_named_with_the_layer_that_they_are(
    off: int, said: str, broken: Callable[..., None], tmp_path: Path
) -> None:
    broken(off=off)

    findings = found(settings_of(tmp_path))

    assert faults(findings) == {"layers": f"what was captured at layer 2 is the output of layer {2 + off}: {said}"}
    assert [one["values"]["nearest"] for one in findings["layers"]] == [2 + off, 3 + off, 5 + off]
    assert ADVICE in findings["layers"][0]["fix"]


def _normed(target: HfTarget, captured: list[Captured]) -> list[Captured]:
    norm = target._ends.norm
    return [replace(one, last=norm(one.last)) for one in captured]


def _of_layer_five(target: HfTarget, captured: list[Captured]) -> list[Captured]:
    return [replace(one, last=one.hidden[:, -192:]) for one in captured]


def _scaled(target: HfTarget, captured: list[Captured]) -> list[Captured]:
    return [replace(one, last=one.last + torch.randn_like(one.last)) for one in captured]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_normed, "has passed the final norm already"),
        (_of_layer_five, "the last state is the output of layer 5, not of layer 7"),
        (_scaled, "norm and head do not make the model's logits of the last state"),
    ],
)
def test_a_last_state_that_is_not_before_the_final_norm_is_a_fault(
    change: Change, said: str, broken: Callable[..., None], tmp_path: Path
) -> None:
    broken(change=change)

    said_of = faults(found(settings_of(tmp_path)))

    assert list(said_of) == ["last"]
    assert said in said_of["last"]


def test_states_of_other_ids_are_those_of_no_layer(broken: Callable[..., None], tmp_path: Path) -> None:
    broken(ids_off=1)

    said = faults(found(settings_of(tmp_path)))

    assert "is the output of no layer of this model for these ids" in said["layers"]
    assert "last" in said


def test_rows_in_another_order_and_cut_rows_are_faults(broken: Callable[..., None], tmp_path: Path) -> None:
    broken(change=lambda _, captured: captured[::-1])
    assert "were asked for" in faults(found(settings_of(tmp_path)))["rows"]


def test_rows_that_lack_a_token_are_a_fault(broken: Callable[..., None], tmp_path: Path) -> None:
    broken(change=lambda _, captured: [replace(one, hidden=one.hidden[:-1]) for one in captured])
    assert "127 hidden and 128 last states" in faults(found(settings_of(tmp_path)))["rows"]


def test_an_embedding_of_another_model_is_a_fault(broken: Callable[..., None], tmp_path: Path) -> None:
    def change(target: HfTarget, captured: list[Captured]) -> list[Captured]:
        target.embedding = target.embedding.roll(1, 0)
        return captured

    broken(change=change)
    said = faults(found(settings_of(tmp_path)))
    assert list(said) == ["ends"]
    assert "its embedding differs by" in said["ends"]


# -- what the run recorded


@pytest.fixture(scope="module")
def said() -> Callable[[float], list[tuple[list[int], list[int]]]]:
    """Prompts and what the target says to them, drawn at a temperature."""
    target = hf.load(load(flags={"target.path": TINY}), [1, 3, 4], torch.device("cpu"))

    def say(temperature: float) -> list[tuple[list[int], list[int]]]:
        generator = torch.Generator().manual_seed(0)
        prompts = torch.randint(3, 2048, (10, 8), generator=generator)
        ids = prompts
        for _ in range(24):
            logits = target.logits(target.forward(ids)[1][:, -1])
            drawn = logits.argmax(-1, keepdim=True)
            if temperature > 0:
                drawn = torch.multinomial(torch.softmax(logits / temperature, -1), 1, generator=generator)
            ids = torch.cat([ids, drawn], -1)
        return [(one[:8].tolist(), one[8:].tolist()) for one in ids]

    return say


def recorded(folder: Path, temperature: float, rows: list[tuple[list[int], list[int]]]) -> Settings:
    run = Run.create(FileStorage(folder), "r", {"target.model": "t", "sampling.temperature": temperature}, {})
    prompts = [Prompt(f"p{number}", "train", [{"role": "user", "content": "?"}]) for number in range(len(rows))]
    run.write_prompts("train-000000", prompts)
    run.commit(
        "train-000000",
        [
            Sample(
                run_id=run.run_id, run="r", batch="train-000000", row_key=prompt.row_key, prompt_id=prompt.prompt_id,
                split="train", messages=prompt.messages, outcome="ok", prompt_token_ids=question, token_ids=answer,
                ids_source="engine", completion_tokens=len(answer),
            )
            for prompt, (question, answer) in zip(prompts, rows, strict=True)
        ],
    )  # fmt: skip
    return settings_of(folder, run="r")


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_what_the_target_said_does_not_surprise_it(
    temperature: float, said: Callable[[float], list[tuple[list[int], list[int]]]], tmp_path: Path
) -> None:
    [finding] = found(recorded(tmp_path, temperature, said(temperature)))["samples"]

    assert finding["level"] == "ok", finding
    assert finding["values"]["rows"] == 10
    assert finding["values"]["tokens"] == 240
    assert finding["values"]["surprise_nats"] < 0.2
    assert (finding["values"]["first_choice"] > 0.99) == (temperature == 0)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("fault", ["another prompt", "another model"])
def test_a_run_of_another_model_or_with_shifted_prompts_is_a_fault(
    fault: str, temperature: float, said: Callable[[float], list[tuple[list[int], list[int]]]], tmp_path: Path
) -> None:
    rows = said(temperature)
    if fault == "another prompt":
        rows = [(rows[number - 1][0], answer) for number, (_, answer) in enumerate(rows)]
    else:
        rows = [(question, [(token + 1) % 2048 for token in answer]) for question, answer in rows]

    findings = found(recorded(tmp_path, temperature, rows))

    worst = findings["samples"][0]
    assert worst["level"] in ({"fault"} if fault == "another model" else {"fault", "warning"}), worst
    assert "target.path" in worst["fix"]
    assert list(faults(findings)) in (["samples"], [])


# -- as the doctor's


def test_findings_are_printed_in_the_doctors_shapes_and_a_fault_is_exit_code_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], broken: Callable[..., None]
) -> None:
    assert doctor_of_target(settings_of(tmp_path), look=examine.look, as_json=True) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["exit_code"] == 0
    assert {one["subject"] for one in said["findings"]} == {"target"}

    broken(off=1)
    assert doctor_of_target(settings_of(tmp_path), look=examine.look) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("fault    target     layers: what was captured at layer 2 is the output of layer 3")
    assert lines[-1].startswith("3 faults")


def test_a_target_that_cannot_be_loaded_and_settings_that_cannot_be_read_are_faults(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert doctor_of_target(settings_of(tmp_path, target__path="/no/such"), look=examine.look) == 1
    assert "there is no such folder" in capsys.readouterr().out

    assert doctor_of_target(SettingsError("a.b is not known."), look=examine.look, as_json=True) == 1
    assert json.loads(capsys.readouterr().out)["counts"]["fault"] == 1
