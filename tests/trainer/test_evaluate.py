"""Draft-and-verify on the tiny target: the same tokens as plain decoding, whatever is drafted; and what is reported."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from draftfleet import tokens
from draftfleet.errors import DrafterError, RunMissing, TargetError, TrainingError
from draftfleet.records import Prompt, Sample, Turn
from draftfleet.runs import Run
from draftfleet.settings import Settings, load
from draftfleet.storage import open_storage
from trainer import algorithms, checkpoint, evaluate, targets
from trainer.algorithms import Choose, Draft, greedy
from trainer.checkpoint import State
from trainer.data import Journal
from trainer.evaluation.asking import asked
from trainer.measure import count
from trainer.speculate import Answer, Limits, decode, decode_batch, decode_with_drafter
from trainer.targets.hf import HfTarget

TINY = str(Path(__file__).parents[2] / "examples" / "tiny-target")
QUESTIONS = ["What is 3 + 4?", 'Spell the word "lemon".', "Which day comes after Monday?", "Who are you?"]


@pytest.fixture(scope="module")
def target() -> Any:
    return targets.load(load(flags={"target.path": TINY}), [1, 3, 6], torch.device("cpu"))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = tokens.load(TINY)
    return [tokenizer.prompt_ids([{"role": "user", "content": question}], None, True, None) for question in QUESTIONS]


@pytest.fixture(scope="module")
def plain(target: HfTarget, prompts: list[list[int]]) -> list[list[int]]:
    return [decode(target, prompt, Limits(60, 1024)) for prompt in prompts]


class Scripted:
    """Drafts from a known answer, each token moved by `error`; checks the states that it is given."""

    def __init__(self, target: HfTarget, sequence: list[int], error: Sequence[int]) -> None:
        self._sequence, self._error = sequence, error
        self._hidden = target.forward(torch.tensor([sequence]))[0][0]
        self._seen = 0

    def propose(self, ids: Tensor, hidden: Tensor, k: int, choose: Choose = greedy) -> Draft:
        new = slice(self._seen, self._seen + len(ids))
        self._seen += len(ids)
        assert ids.tolist() == self._sequence[new.start + 1 : new.stop + 1]
        torch.testing.assert_close(hidden, self._hidden[new], rtol=1e-3, atol=1e-3)
        drafted = self._sequence[self._seen + 1 : self._seen + 1 + k]
        drafted += [5] * (k - len(drafted))
        ids = [(token + wrong) % 2048 for token, wrong in zip(drafted, self._error, strict=False)]
        return Draft(ids, torch.nn.functional.one_hot(torch.tensor(ids), 2048).float())


def test_plain_decoding_ends_with_a_stop_token(target: HfTarget, plain: list[list[int]]) -> None:
    assert target.eos_token_ids == {0, 2}
    assert all(ids[-1] == 2 and 2 not in ids[:-1] for ids in plain)


def test_decoding_in_a_batch_gives_the_tokens_of_decoding_alone(
    target: HfTarget, prompts: list[list[int]], plain: list[list[int]]
) -> None:
    assert decode_batch(target, prompts, Limits(60, 1024)) == plain
    assert decode_batch(target, prompts, Limits(7, 1024)) == [ids[:7] for ids in plain]


@pytest.mark.parametrize(
    ("error", "accepted"), [((0, 0, 0), 3), ((1, 0, 0), 0), ((0, 7, 0), 1), ((0, 0, 1), 2)], ids=str
)
def test_tokens_are_those_of_plain_decoding_whatever_is_drafted(
    target: HfTarget, prompts: list[list[int]], plain: list[list[int]], error: tuple[int, ...], accepted: int
) -> None:
    for prompt, expected in zip(prompts, plain, strict=True):
        proposer = Scripted(target, prompt + expected, error)

        answer = decode_with_drafter(target, proposer, prompt, Limits(60, 1024), k=3)

        assert answer.ids == expected
        assert answer.drafted == [3] * len(answer.accepted)
        assert set(answer.accepted[:-1]) == {accepted}  # the last draft reaches past the stop token
        passes = 1 + len(answer.accepted)
        assert passes == 1 + -(-(len(expected) - 1) // (accepted + 1))


@pytest.mark.parametrize(("max_tokens", "room"), [(10, 1000), (1, 1000), (1000, 10), (1000, 2), (1000, 1)])
def test_an_answer_ends_at_its_limit_and_at_the_end_of_the_context(
    target: HfTarget, prompts: list[list[int]], plain: list[list[int]], max_tokens: int, room: int
) -> None:
    prompt, longest = prompts[0], min(max_tokens, room)
    limits = Limits(max_tokens, len(prompt) + room)

    answer = decode_with_drafter(target, Scripted(target, prompt + plain[0], (0, 0, 0)), prompt, limits, k=3)

    assert answer.ids == plain[0][:longest] == decode(target, prompt, limits)
    assert all(drafted <= 3 for drafted in answer.drafted)
    assert sum(answer.drafted) < room


def test_counting_follows_vllm() -> None:
    answers = [Answer([1] * 9, [3, 3, 3], [3, 0, 2]), Answer([1] * 3, [3], [1])]

    assert count(answers, 3) == (4, 6, [3 / 4, 2 / 4, 1 / 4])
    assert count([Answer([1], [], [])], 2) == (0, 0, [0, 0])


# A run in a folder.


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    knobs = {"storage.url": str(tmp_path), "run": "r", "target.path": TINY, "trainer.drafter": "d"}
    return load(flags={**knobs, "evaluation.max_tokens": 24, "evaluation.prompts": 10, "trainer.device": "cpu"})


@pytest.fixture
def run(settings: Settings) -> Run:
    """Four held-out prompts in two batches, of which one is done and answered one of its two; a prompt to train on."""
    run = Run.create(
        open_storage(settings.storage.url), "r", {"sampling.thinking": True, "sampling.extra_body": {}}, {}
    )
    prompts = [
        Prompt(f"p{i}", "heldout", [{"role": "user", "content": text}], source="days" if i > 1 else "")
        for i, text in enumerate(QUESTIONS)
    ]
    run.write_prompts("heldout-000000", prompts[:2])
    run.write_prompts("heldout-000001", prompts[2:])
    run.write_prompts("train-000000", [replace(prompts[0], split="train", prompt_id="t")])
    run.commit("heldout-000000", [served(run, prompts[0], [11, 12, 13]), served(run, prompts[1], [])])
    return run


def served(run: Run, prompt: Prompt, ids: list[int]) -> Sample:
    return Sample(
        run_id=run.run_id,
        run=run.name,
        batch="heldout-000000",
        row_key=prompt.row_key,
        prompt_id=prompt.prompt_id,
        split="heldout",
        messages=prompt.messages,
        outcome="ok" if ids else "failed",
        prompt_token_ids=ids,
    )


def put_drafter(run: Run, settings: Settings, target: HfTarget, step: int, **changes: Any) -> None:
    torch.manual_seed(step)
    config = algorithms.configure(settings, target)
    tensors = algorithms.build(config, target).drafter.state_dict()
    checkpoint.write(
        run.drafter_dir("d"),
        config=replace(config, **changes),
        tensors=tensors,
        state=State(step=step),
        optimizer={},
        journal=Journal(),
        keep=2,
    )


def test_prompts_are_the_ids_that_were_served_and_else_rendered_as_the_run_pins_it(
    run: Run, settings: Settings, prompts: list[list[int]]
) -> None:
    assert list(evaluate.prompt_ids(run, settings)) == [[11, 12, 13], *prompts[1:]]

    fewer = settings.model_copy(update={"evaluation": settings.evaluation.model_copy(update={"prompts": 3})})
    assert list(evaluate.prompt_ids(run, fewer)) == [[11, 12, 13], *prompts[1:3]]


def test_an_evaluation_judges_the_newest_checkpoint_and_writes_down_what_it_returns(
    run: Run, settings: Settings, target: HfTarget
) -> None:
    for step in (2, 10):
        put_drafter(run, settings, target, step)

    found = evaluate.evaluate(settings, progress=False)

    assert json.loads((run.drafter_dir("d") / "evaluation.json").read_text()) == json.loads(json.dumps(asdict(found)))
    assert (found.checkpoint, found.prompts, found.k) == ("step-000010", 4, 3)
    assert found.lossless
    assert found.lossless_prompts == 4
    assert found.drafted == 3 * found.drafts
    assert found.acceptance_length == pytest.approx(1 + found.accepted / found.drafts)
    assert found.acceptance_length == pytest.approx(1 + sum(found.acceptance_per_position))
    assert sorted(found.acceptance_per_position, reverse=True) == found.acceptance_per_position
    # Each prompt's first token comes without a draft; an answer that is cut drops what its last pass yielded too much.
    assert found.tokens <= 4 + found.drafts + found.accepted
    assert found.speedup == pytest.approx(found.tokens_per_s / found.plain_tokens_per_s)


def with_knobs(settings: Settings, **knobs: Any) -> Settings:
    return settings.model_copy(update={"evaluation": settings.evaluation.model_copy(update=knobs)})


def test_several_k_are_measured_beside_each_other_and_the_largest_is_looked_at_closely(
    run: Run, settings: Settings, target: HfTarget
) -> None:
    put_drafter(run, settings, target, 2)

    found = evaluate.evaluate(with_knobs(settings, k=4, sweep=[1, 4], max_tokens=12), progress=False)

    assert [row.k for row in found.sweep] == [1, 4]
    assert [len(row.acceptance_per_position) for row in found.sweep] == [1, 4]
    assert [row.lossless_prompts for row in found.sweep] == [4, 4]
    assert (found.k, found.acceptance_length) == (4, found.sweep[-1].acceptance_length)


def test_parts_add_up_to_the_whole(run: Run, settings: Settings, target: HfTarget) -> None:
    put_drafter(run, settings, target, 2)

    found = evaluate.evaluate(with_knobs(settings, max_tokens=16), progress=False)

    assert set(found.domains) == {"days", "no source"}
    assert found.domains["days"].conversations == 2
    assert set(found.phases) <= {"thinking", "answer"}
    assert list(found.context) == ["<512"]
    assert found.turns == {}
    for part in (found.domains, found.phases, found.context):
        assert sum(one.drafts for one in part.values()) == found.drafts
        assert sum(one.accepted for one in part.values()) == found.accepted
    assert found.teacher_forced is not None
    assert found.teacher_forced.real_acceptance_length == pytest.approx(found.acceptance_length, abs=0.1)
    assert found.warnings == []


def test_sampled_answers_are_drawn_again_from_the_same_seed(run: Run, settings: Settings, target: HfTarget) -> None:
    put_drafter(run, settings, target, 2)
    knobs = {"temperature": 1.5, "max_tokens": 8, "prompts": 2}

    one, again = (evaluate.evaluate(with_knobs(settings, **knobs), progress=False) for _ in range(2))
    other = evaluate.evaluate(with_knobs(settings, **knobs, seed=1, drafts="best"), progress=False)

    assert (one.lossless, one.lossless_prompts, one.teacher_forced) == (None, None, None)
    assert (one.tokens, one.accepted, one.acceptance_per_position) == (
        again.tokens, again.accepted, again.acceptance_per_position,
    )  # fmt: skip
    assert one.expected_acceptance_per_position == again.expected_acceptance_per_position
    assert one.expected_acceptance_length == pytest.approx(1 + sum(one.expected_acceptance_per_position or []))
    assert other.expected_acceptance_per_position != one.expected_acceptance_per_position
    assert (one.drafts_are, other.drafts_are) == ("sampled", "best")


def test_every_turn_of_a_conversation_is_asked_and_its_tools_go_with_it(run: Run, settings: Settings) -> None:
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
    talk = [
        {"role": "user", "content": "What is 2 + 3?"},
        {"role": "assistant", "content": "5"},
        {"role": "user", "content": "And twice that?"},
    ]
    answered, unanswered = (Prompt(name, "heldout", talk, tools) for name in ("a", "b"))
    conversation = Run.create(open_storage(settings.storage.url), "talk", {"producer.turns": "all"}, {})
    conversation.write_prompts("heldout-000000", [answered])
    conversation.write_prompts("heldout-000001", [unanswered])
    first = Turn(message=1, prompt_token_ids=[1, 2], token_ids=[3], ids_source="engine")
    conversation.commit("heldout-000000", [replace(served(conversation, answered, [1, 2, 3, 4]), turns=[first])])

    found = list(asked(conversation, settings))

    assert [(one.conversation, one.turn, one.ids) for one in found[:2]] == [
        (answered.row_key, 0, [1, 2]), (answered.row_key, 1, [1, 2, 3, 4]),
    ]  # fmt: skip
    [rendered] = found[2:]
    text = tokens.load(TINY).decode(rendered.ids)
    assert (rendered.conversation, rendered.turn) == (unanswered.row_key, 0)
    assert "What is 2 + 3?" in text
    assert "And twice" not in text
    assert rendered.ids == tokens.load(TINY).prompt_ids(talk[:1], tools, None, None)


def test_a_block_drafts_no_more_than_it_was_trained_to(run: Run, settings: Settings) -> None:
    knobs = {"trainer.algorithm": "dflash", "dflash.num_layers": 1, "dflash.block_size": 4}
    blocks = load(
        flags={"storage.url": settings.storage.url, "run": "r", "target.path": TINY, "trainer.drafter": "d"} | knobs
    )
    put_drafter(run, blocks, targets.load(blocks, [2, 4, 5], torch.device("cpu")), 2)

    found = evaluate.evaluate(with_knobs(blocks, k=7, sweep=[2, 5], prompts=2, max_tokens=8), progress=False)

    assert [row.k for row in found.sweep] == [2, 3]
    assert found.teacher_forced is not None
    assert abs(found.teacher_forced.gap) < 0.02


def test_prompts_that_leave_no_room_for_an_answer_are_counted(run: Run, settings: Settings, target: HfTarget) -> None:
    put_drafter(run, settings, target, 2)
    narrow = settings.model_copy(update={"target": settings.target.model_copy(update={"context_tokens": 12})})

    found = evaluate.evaluate(narrow, progress=False)

    assert (found.prompts, found.prompts_too_long) == (1, 3)
    assert found.lossless


def test_what_is_missing_is_named(run: Run, settings: Settings, target: HfTarget) -> None:
    with pytest.raises(DrafterError, match=r"run r has no checkpoint of drafter d .*draftfleet train --run r"):
        evaluate.evaluate(settings, progress=False)

    put_drafter(run, settings, target, 2)
    narrow = settings.model_copy(update={"target": settings.target.model_copy(update={"context_tokens": 4})})
    with pytest.raises(TrainingError, match=r"run r has 4 held-out prompts, of which none leaves room"):
        evaluate.evaluate(narrow, progress=False)
    for held_out in run.storage.list("r/prompts"):
        if held_out.startswith("heldout"):
            run.storage.delete(f"r/prompts/{held_out}")
    with pytest.raises(TrainingError, match=r"run r has no held-out prompts: produce one with"):
        evaluate.evaluate(settings, progress=False)
    with pytest.raises(RunMissing, match="run other is not in"):
        evaluate.evaluate(settings.model_copy(update={"run": "other"}), progress=False)


def test_a_drafter_that_does_not_fit_its_description_is_refused(run: Run, settings: Settings, target: HfTarget) -> None:
    put_drafter(run, settings, target, 2, intermediate_size=64)

    with pytest.raises(DrafterError, match=r"step-000002 does not fit its own drafter\.json"):
        evaluate.evaluate(settings, progress=False)


def test_the_target_is_the_one_that_the_drafter_was_trained_for_unless_named(
    run: Run, settings: Settings, target: HfTarget
) -> None:
    put_drafter(run, settings, target, 2)
    unnamed = settings.model_copy(
        update={
            "target": settings.target.model_copy(update={"path": ""}),
            "evaluation": settings.evaluation.model_copy(update={"prompts": 2, "dtype": "bfloat16"}),
        }
    )

    found = evaluate.evaluate(unnamed, progress=False)

    assert (found.prompts, found.dtype) == (2, "bfloat16")


def test_a_target_that_the_drafter_was_not_trained_for_is_refused(
    run: Run, settings: Settings, target: HfTarget, tmp_path: Path
) -> None:
    put_drafter(run, settings, target, 2)
    shape = Qwen3Config(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=8, num_attention_heads=2,
        num_key_value_heads=1,
    )  # fmt: skip
    Qwen3ForCausalLM(shape).save_pretrained(tmp_path / "other")
    wrong = settings.model_copy(update={"target": settings.target.model_copy(update={"path": str(tmp_path / "other")})})

    with pytest.raises(TargetError, match=r"8 layers of width 192 and a vocabulary of 2048 .*other has 8, 32 and 64"):
        evaluate.evaluate(wrong, progress=False)
