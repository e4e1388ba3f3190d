"""An import into a run on a real storage, with a real tokenizer: what becomes of each response."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from draftfleet import again, tokens
from draftfleet.accounting import Accountant
from draftfleet.errors import DataError, RunConflict, RunMissing, SettingsError
from draftfleet.names import batch_id
from draftfleet.records import Prompt, Sample, prompt_id
from draftfleet.runs import Run
from draftfleet.settings import Settings, load
from draftfleet.storage import FileStorage
from draftfleet.tokens import TargetTokenizer
from draftfleet.verify import verify
from producer.import_data.importing import import_data
from producer.import_data.report import Report
from workers.partials import Partials

TARGET = Path(__file__).parents[2] / "examples" / "tiny-target"
BATCH = 4

Import = Callable[..., Report]
MakePrompts = Callable[..., list[Prompt]]
Write = Callable[..., Path]


@pytest.fixture(scope="module")
def tokenizer() -> TargetTokenizer:
    return tokens.load(TARGET)


@pytest.fixture
def run(storage: FileStorage, tokenizer: TargetTokenizer) -> Run:
    content = {"target.model": "tiny", "target.fingerprint": tokenizer.fingerprint(), "sampling.max_tokens": 64}
    return Run.create(storage, "run", content, {})


@pytest.fixture
def importing(storage: FileStorage) -> Import:
    settings = load(flags={"storage.url": storage.url, "run": "run", "target.path": str(TARGET)})

    def do(*paths: Path, **flags: Any) -> Report:
        return import_data(settings, [str(path) for path in paths], **flags)

    return do


@pytest.fixture
def settings(storage: FileStorage) -> Settings:
    return load(flags={"storage.url": storage.url, "run": "run", "target.path": str(TARGET)})


def fill(run: Run, prompts: Sequence[Prompt], size: int = BATCH) -> list[str]:
    """As a producer does."""
    names = [batch_id("train", number) for number in range(-(-len(prompts) // size))]
    for number, name in enumerate(names):
        run.write_prompts(name, prompts[number * size : (number + 1) * size])
    run.seal({"prompts": len(prompts)})
    return names


def answered(prompt: Prompt, **fields: Any) -> dict[str, Any]:
    """With a count that fits the text, so that the ids can be held against it."""
    answer = {"messages": prompt.messages, "response": f"Answer to {prompt.messages[-1]['content']}"}
    return answer | {"finish_reason": "stop"} | fields


def samples(run: Run) -> dict[str, Sample]:
    """All that stand in shards or in partials."""
    found = [sample for batch in run.done() for sample in run.read_samples(batch)]
    found += [sample for name in run.partials() for sample in run.read_partial(name)]
    assert len(found) == len({sample.row_key for sample in found}), "doubled"
    return {sample.row_key: sample for sample in found}


def test_whole_batches_become_shards_and_others_are_finished_by_whoever_takes_them(
    run: Run, importing: Import, make_prompts: MakePrompts, write_jsonl: Write
) -> None:
    prompts = make_prompts(10)
    names = fill(run, prompts)
    data = write_jsonl([answered(prompt) for prompt in reversed(prompts[:6])])

    report = importing(data, trust_text=True)

    assert (report.lines, report.responses, report.imported, report.missing) == (6, 6, 6, 4)
    assert (report.batches_done, report.batches_begun) == (1, 1)
    assert run.done() == names[:1]
    assert [sample.row_key for sample in run.read_samples(names[0])] == [prompt.row_key for prompt in prompts[:4]]
    found = Partials(run, "worker").earlier(names[1], {prompt.row_key for prompt in prompts[4:8]})
    assert set(found) == {prompt.row_key for prompt in prompts[4:6]}
    account = Accountant(run).account()
    assert (account.ok, account.pending, account.holds) == (4, 6, True)
    assert verify(run).faults == []


def test_a_worker_does_not_read_the_partials_of_other_batches(
    run: Run, importing: Import, make_prompts: MakePrompts, write_jsonl: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = make_prompts(12)
    names = fill(run, prompts)
    importing(write_jsonl([answered(prompts[0]), answered(prompts[4]), answered(prompts[8])]), trust_text=True)
    read: list[str] = []
    read_partial = Run.read_partial
    monkeypatch.setattr(Run, "read_partial", lambda run, name: read.append(name) or read_partial(run, name))
    partials = Partials(run, "worker")

    found = partials.earlier(names[1], {prompts[4].row_key})

    assert set(found) == {prompts[4].row_key}
    assert len(read) == 1
    assert len(run.partials()) == 3
    run.commit(names[1], [replace(sample, batch=names[1]) for sample in found.values()])
    assert partials.clean(names[1]) == 1
    assert len(run.partials()) == 2


def test_an_import_completes_what_another_began_and_the_same_file_again_adds_nothing(
    run: Run, importing: Import, make_prompts: MakePrompts, write_jsonl: Write
) -> None:
    prompts = make_prompts(4)
    [name] = fill(run, prompts)
    first = write_jsonl([answered(prompts[2]), answered(prompts[0])], "first.jsonl")
    second = write_jsonl([answered(prompts[3]), answered(prompts[1])], "second.jsonl")

    reports = [importing(path, trust_text=True) for path in (first, first, second, first, second)]

    assert [report.imported for report in reports] == [2, 0, 2, 0, 0]
    assert [report.already for report in reports] == [0, 2, 0, 2, 2]
    assert [sample.row_key for sample in run.read_samples(name)] == [prompt.row_key for prompt in prompts]
    assert [sample.server for sample in run.read_samples(name)][::2] == ["imported:first.jsonl"] * 2
    assert verify(run).faults == []


def test_every_response_is_counted_as_exactly_one_thing(
    run: Run, importing: Import, make_prompts: MakePrompts, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prompts = make_prompts(5)
    fill(run, prompts)
    rows = [
        answered(prompts[0]),
        answered(prompts[0]),
        answered(prompts[0], response="Another one."),
        answered(prompts[1], model="other"),
        answered(prompts[2], finish_reason="abort"),
        answered(make_prompts(1, start=99)[0], id="elsewhere"),
        answered(prompts[3], response=7),
    ]
    data, rest = tmp_path / "data.jsonl", tmp_path / "rest.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows) + '\n{"torn": \n')

    report = importing(data, trust_text=True, unmatched=str(rest))

    assert (report.imported, report.surplus, report.unmatched, report.malformed, report.refused) == (1, 2, 1, 2, 2)
    assert report.refused_for == {"model other": 1, "finish reason": 1}
    assert (report.lines, report.responses) == (8, 8)
    assert [json.loads(line) for line in rest.read_text().splitlines()] == [rows[5]]
    assert "no prompt of the run file=data.jsonl line=6 why=elsewhere" in caplog.text
    assert "response refused file=data.jsonl line=4" in caplog.text
    assert "line malformed file=data.jsonl line=9" in caplog.text
    assert "Question" not in caplog.text


@pytest.mark.parametrize("name", ["row_key", "prompt_id", "id", "custom_id"])
def test_a_row_is_found_by_our_names_without_its_prompt(
    run: Run, importing: Import, make_prompts: MakePrompts, write_jsonl: Write, name: str
) -> None:
    prompts = make_prompts(2)
    fill(run, prompts)
    ours = prompts[1].prompt_id if name == "prompt_id" else prompts[1].row_key

    report = importing(write_jsonl([{name: ours, "content": "Yes."}]), trust_text=True)

    assert report.matched_by == {"prompt_id" if name == "prompt_id" else "row_key": 1}
    assert list(samples(run)) == [prompts[1].row_key]


def test_a_prompt_is_found_however_its_row_was_written(
    run: Run, importing: Import, write_jsonl: Write, tmp_path: Path
) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Name a prime."}]
    tools = [{"type": "function", "function": {"name": "is_prime", "parameters": {"type": "object"}}}]
    source = [*messages, {"role": "assistant", "content": "2"}]
    prompts = [
        Prompt(prompt_id(source, None), "train", messages),
        Prompt(prompt_id(messages, tools), "train", messages, tools),
        Prompt(prompt_id(messages[1:], None), "train", messages[1:]),
    ]
    fill(run, prompts)
    sharegpt = {
        "system": "Be brief.",
        "conversations": [{"from": "human", "value": "Name a prime."}, {"from": "gpt", "value": "3"}],
    }
    with_tools = {"messages": [*messages, {"role": "assistant", "content": "5"}], "tools": json.dumps(tools)}
    pq.write_table(pa.Table.from_pylist([{"prompt": "Name a prime.", "response": "7"}]), tmp_path / "data.parquet")

    report = importing(write_jsonl([sharegpt, with_tools]), tmp_path / "data.parquet", trust_text=True)

    assert (report.imported, report.unmatched) == (3, 0)
    assert [samples(run)[prompt.row_key].content for prompt in prompts] == ["3", "5", "7"]


def test_several_responses_fill_the_samples_of_a_prompt_in_order_and_the_same_text_fills_one(
    run: Run, importing: Import, make_prompts: MakePrompts, write_jsonl: Write
) -> None:
    [one] = make_prompts(1)
    prompts = [replace(one, sample=number) for number in range(3)]
    fill(run, prompts)
    rows = [answered(one, response=text) for text in ("a", "b", "a")]

    first = importing(write_jsonl(rows), trust_text=True)
    again_ = importing(write_jsonl(rows), trust_text=True)
    last = importing(write_jsonl([answered(one, response=text) for text in ("b", "c", "d")]), trust_text=True)

    assert (first.imported, first.surplus) == (2, 1)
    assert (again_.imported, again_.already) == (0, 3)
    assert (last.imported, last.already, last.surplus) == (1, 1, 1)
    assert [samples(run)[prompt.row_key].content for prompt in prompts] == ["a", "b", "c"]


def test_given_ids_are_kept_if_they_spell_the_text_and_the_row_is_refused_if_not(
    run: Run, importing: Import, make_prompts: MakePrompts, write_jsonl: Write, tokenizer: TargetTokenizer
) -> None:
    prompts = make_prompts(6)
    fill(run, prompts, 1)
    ids = tokenizer.encode("<think>\nSmall.\n</think>\n\n7" + tokenizer.end_of_turn)
    asked = [tokenizer.prompt_ids(prompt.messages) for prompt in prompts]
    text = {"reasoning": "Small.", "response": "7", "token_ids": ids}
    rows = [
        answered(prompts[0], **text, prompt_token_ids=asked[0], usage={"completion_tokens": len(ids)}),
        {"messages": prompts[1].messages, "token_ids": ids, "prompt_token_ids": asked[1]},
        answered(prompts[2], **text | {"response": "8"}),
        answered(prompts[3], **text | {"token_ids": [tokenizer.vocab_size]}),
        answered(prompts[4], **text, prompt_token_ids=asked[0]),
        answered(prompts[5], **text, usage={"completion_tokens": len(ids) + 1}),
    ]
    rows[1]["messages"] = None
    rows[1]["id"] = prompts[1].prompt_id

    report = importing(write_jsonl(rows))

    assert (report.imported, report.engine, report.retokenized, report.untrained) == (3, 3, 0, 1)
    assert report.refused_for == {"token ids": 2, "prompt ids": 1}
    found = samples(run)
    for prompt in prompts[:2]:
        sample = found[prompt.row_key]
        assert (sample.token_ids, sample.ids_source, sample.ids_match_usage) == (ids, "engine", True)
        assert (sample.reasoning, sample.content, sample.finish_reason) == ("Small.", "7", "stop")
        assert sample.prompt_token_ids == tokenizer.prompt_ids(prompt.messages)
        assert (sample.dialect, sample.worker) == ("import-data", "import-data")
    assert not found[prompts[5].row_key].ids_match_usage


def test_speculators_rows_are_found_by_the_ids_of_their_prompt(
    run: Run, importing: Import, make_prompts: MakePrompts, write_jsonl: Write, tokenizer: TargetTokenizer
) -> None:
    prompts = make_prompts(3)
    fill(run, prompts)
    asked, ids = tokenizer.prompt_ids(prompts[1].messages), tokenizer.encode("Yes." + tokenizer.end_of_turn)
    row = {"id": "c_gen0", "input_ids": asked + ids, "loss_mask": [0] * len(asked) + [1] * len(ids)}
    metadata = {"finish_reason": "stop", "usage": {"completion_tokens": len(ids)}}

    report = importing(write_jsonl([row | {"metadata": metadata}, row | {"input_ids": [*asked[:-1], 0, *ids]}]))

    assert (report.imported, report.unmatched, report.matched_by) == (1, 1, {"token_ids": 1})
    sample = samples(run)[prompts[1].row_key]
    assert (sample.content, sample.token_ids, sample.ids_source) == ("Yes.", ids, "engine")


def test_ids_made_of_text_are_held_against_the_count_that_the_file_gives(
    run: Run, importing: Import, make_prompts: MakePrompts, write_jsonl: Write, tokenizer: TargetTokenizer
) -> None:
    prompts = make_prompts(4)
    fill(run, prompts, 1)
    written = tokenizer.encode("<think>\nSmall.\n</think>\n\n7" + tokenizer.end_of_turn)
    bare = tokenizer.encode("<think>Small.</think>7" + tokenizer.end_of_turn)
    rows = [
        answered(prompts[0], response="7", reasoning="Small.", usage={"completion_tokens": len(written)}),
        answered(prompts[1], response="7", reasoning="Small.", usage={"completion_tokens": 99}),
        answered(prompts[2], response="<think>Small.</think>7", usage={"completion_tokens": len(bare)}),
        answered(prompts[3], response="7", finish_reason=None, usage={"completion_tokens": 2}),
    ]

    report = importing(write_jsonl(rows))

    assert (report.imported, report.retokenized, report.untrained) == (4, 4, 1)
    found = [samples(run)[prompt.row_key] for prompt in prompts]
    assert [sample.token_ids for sample in found[::2]] == [written, bare]
    assert [sample.ids_match_usage for sample in found] == [True, False, True, True]
    assert (found[2].reasoning, found[2].content, found[2].reasoning_source) == ("Small.", "7", "think_tags")
    assert found[3].token_ids == tokenizer.encode("7" + tokenizer.end_of_turn), "the count says that it ended"


def test_nobody_decides_for_a_person_whether_text_is_trusted_and_nothing_is_written_before(
    run: Run, importing: Import, make_prompts: MakePrompts, write_jsonl: Write
) -> None:
    prompts = make_prompts(4)
    fill(run, prompts)
    data = write_jsonl([answered(prompt) for prompt in prompts])

    with pytest.raises(SettingsError, match=r"4 of 4 rows have neither .* --trust-text .* --no-trust-text"):
        importing(data)
    dry = importing(data, dry_run=True)
    assert (dry.imported, dry.untrained, dry.missing, dry.record) == (4, 4, 0, None)
    assert (run.done(), run.partials(), list(run.storage.list("run/imports"))) == ([], [], [])
    report = importing(data, trust_text=False)

    assert (report.imported, report.untrained) == (4, 4)
    assert Accountant(run).account().mismatched == 4


def test_trusted_text_is_trained_on_and_no_stop_token_is_invented(
    run: Run, importing: Import, make_prompts: MakePrompts, write_jsonl: Write, tokenizer: TargetTokenizer
) -> None:
    prompts = make_prompts(4)
    fill(run, prompts, 1)
    rows = [
        answered(prompts[0], response="Yes."),
        answered(prompts[1], response="Yes.", finish_reason=None),
        answered(prompts[2], response="Yes.", finish_reason="length"),
        answered(prompts[3], response=None, reasoning="Let me", finish_reason=None),
    ]

    report = importing(write_jsonl(rows), trust_text=True)

    found = [samples(run)[prompt.row_key] for prompt in prompts]
    end = tokenizer.encode(tokenizer.end_of_turn)
    assert report.untrained == 0
    assert all(sample.ids_match_usage and sample.ids_source == "retokenized" for sample in found)
    assert [sample.token_ids[-len(end) :] == end for sample in found] == [True, False, False, False]
    assert [sample.finish_reason for sample in found] == ["stop", None, "length", None]
    assert [sample.outcome for sample in found] == ["ok", "ok", "truncated", "truncated"]


def test_a_conversation_answered_turn_by_turn_fits_a_run_that_asks_every_turn(
    storage: FileStorage, importing: Import, write_jsonl: Write, tokenizer: TargetTokenizer
) -> None:
    run = Run.create(storage, "run", {"target.model": "tiny", "producer.turns": "all"}, {})
    source = [
        {"role": "user", "content": "Name a prime."},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "A larger one."},
    ]
    prompt = Prompt(prompt_id(source, None), "train", source)
    fill(run, [prompt])
    regenerated = [
        source[0],
        {"role": "assistant", "content": "7", "reasoning_content": "Small."},
        source[2],
        {"role": "assistant", "content": "11", "reasoning_content": "Larger."},
    ]

    report = importing(write_jsonl([{"conversations": regenerated, "status": "success"}]), trust_text=True)

    sample = samples(run)[prompt.row_key]
    assert (report.imported, report.forms) == (1, {"specforge": 1})
    assert sample.messages == regenerated[:3]
    assert (sample.reasoning, sample.content) == ("Larger.", "11")
    [turn] = sample.turns
    assert turn.message == 1
    assert turn.prompt_token_ids == tokenizer.prompt_ids(source[:1])
    assert turn.ids_match_usage
    assert tokenizer.decode(turn.token_ids).split() == ["<think>", "Small.", "</think>", "7"]


def test_our_own_samples_can_move_to_another_run(
    run: Run, importing: Import, make_prompts: MakePrompts, storage: FileStorage, write_jsonl: Write
) -> None:
    prompts = make_prompts(3)
    fill(run, prompts)
    importing(write_jsonl([answered(prompt) for prompt in prompts]), trust_text=True)
    other = Run.create(storage, "other", {"target.model": "tiny"}, {})
    fill(other, prompts, 2)
    settings = load(flags={"storage.url": storage.url, "run": "other", "target.path": str(TARGET)})

    report = import_data(settings, [str(storage.root / "run/samples")])

    assert (report.imported, report.untrained, report.forms) == (3, 0, {"samples": 3})
    assert verify(other).faults == []


def test_a_row_that_was_split_off_or_is_asked_again_is_filled_where_it_is_asked_now(
    run: Run, importing: Import, make_prompts: MakePrompts, make_sample: Callable[..., Sample], write_jsonl: Write
) -> None:
    prompts = make_prompts(6)
    names = fill(run, prompts, 3)
    run.split(names[0], 3)
    run.commit(f"{names[0]}.0000", [make_sample(prompts[0], f"{names[0]}.0000")])
    run.bury(f"{names[0]}.0001", make_sample(prompts[1], f"{names[0]}.0001", outcome="failed"))
    failed = [make_sample(prompt, names[1], outcome="failed") for prompt in prompts[3:]]
    run.commit(names[1], failed)
    again.create(run, failed[:1], batch_size=3)

    report = importing(write_jsonl([answered(prompt) for prompt in prompts]), trust_text=True)

    assert (report.imported, report.already, report.missing) == (3, 3, 0)
    assert run.done() == [f"{names[0]}.000{part}" for part in range(3)] + [names[1], "train-again-000000"]
    account = Accountant(run).account()
    assert (account.ok, account.failed, account.pending, account.holds) == (4, 2, 0, True)
    assert verify(run).faults == []


def test_a_batch_that_a_worker_commits_meanwhile_is_left_as_it_is(
    run: Run,
    importing: Import,
    make_prompts: MakePrompts,
    make_sample: Callable[..., Sample],
    write_jsonl: Write,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prompts = make_prompts(8)
    names = fill(run, prompts)
    commit, is_done = Run.commit, Run.is_done

    def commit_second(run: Run, batch: str, samples: list[Sample]) -> bool:
        commit(run, batch, [make_sample(prompt, batch) for prompt in prompts[:4]])
        return commit(run, batch, samples)

    def is_done_by_now(run: Run, batch: str) -> bool:
        if run.partials():
            commit(run, batch, [make_sample(prompt, batch) for prompt in prompts[4:]])
        return is_done(run, batch)

    monkeypatch.setattr(Run, "commit", commit_second)
    monkeypatch.setattr(Run, "is_done", is_done_by_now)
    report = importing(write_jsonl([answered(prompt) for prompt in prompts[:6]]), trust_text=True)

    assert (report.imported, report.already) == (0, 6)
    assert run.done() == names
    assert {sample.content for sample in samples(run).values()} == {"Answer."}
    assert run.partials() == []


def test_the_run_says_what_was_imported_from_which_bytes(
    run: Run, importing: Import, make_prompts: MakePrompts, write_jsonl: Write
) -> None:
    prompts = make_prompts(2)
    fill(run, prompts)

    report = importing(write_jsonl([answered(prompts[0])]), trust_text=True)

    record = json.loads(run.storage.read(f"run/imports/{report.record}.json"))
    assert len(record["files"][0]["sha256"]) == 64
    assert (record["files"][0]["name"], record["to_import"], record["trust_text"]) == ("data.jsonl", 1, True)


def test_a_file_of_no_known_form_is_an_error_and_changes_nothing(
    run: Run, importing: Import, make_prompts: MakePrompts, write_jsonl: Write
) -> None:
    prompts = make_prompts(1)
    fill(run, prompts)
    good = write_jsonl([answered(prompts[0])], "good.jsonl")

    with pytest.raises(DataError, match=r"none of the known forms: samples.*Its columns: a, b"):
        importing(good, write_jsonl([{"a": 1, "b": 2}] * 3, "bad.jsonl"), trust_text=True)

    assert (run.done(), run.partials()) == ([], [])


def test_a_wrong_run_or_tokenizer_is_refused_before_anything_is_read(
    run: Run, importing: Import, settings: Settings, storage: FileStorage, write_jsonl: Write
) -> None:
    data = write_jsonl([{"prompt": "x", "response": "y"}])
    nobody = settings.model_copy(update={"target": settings.target.model_copy(update={"path": ""})})
    with pytest.raises(SettingsError, match=r"target\.path is not set"):
        import_data(nobody, [str(data)])
    with pytest.raises(RunMissing):
        import_data(settings.model_copy(update={"run": "gone"}), [str(data)])

    Run.create(storage, "other", {"target.model": "tiny", "target.fingerprint": "0" * 32}, {})
    with pytest.raises(RunConflict, match="another tokenizer"):
        import_data(settings.model_copy(update={"run": "other"}), [str(data)])


def test_a_run_of_mixed_thinking_has_each_answer_show_which_it_was(
    storage: FileStorage, importing: Import, make_prompts: MakePrompts, write_jsonl: Write, tokenizer: TargetTokenizer
) -> None:
    run = Run.create(storage, "run", {"target.model": "tiny", "sampling.thinking_share": 0.5}, {})
    prompts = make_prompts(2)
    fill(run, prompts)

    importing(write_jsonl([answered(prompts[0], reasoning="Hm."), answered(prompts[1])]), trust_text=True)

    found = [samples(run)[prompt.row_key] for prompt in prompts]
    assert [sample.drawn for sample in found] == [{"thinking": True}, {"thinking": False}]
    for sample, thinking in zip(found, (True, False), strict=True):
        assert sample.prompt_token_ids == tokenizer.prompt_ids(sample.messages, thinking=thinking)


def test_a_run_without_thinking_takes_no_thoughts(
    storage: FileStorage, importing: Import, make_prompts: MakePrompts, write_jsonl: Write
) -> None:
    run = Run.create(storage, "run", {"target.model": "tiny", "sampling.thinking": False}, {})
    prompts = make_prompts(2)
    fill(run, prompts)

    report = importing(write_jsonl([answered(prompts[0], reasoning="Hm."), answered(prompts[1])]), trust_text=True)

    assert (report.imported, report.refused_for) == (1, {"reasoning": 1})


@pytest.mark.parametrize("said", ["tiny", "org/Tiny", "/models/tiny/"])
def test_another_name_of_the_same_model_is_no_other_model(
    run: Run, importing: Import, make_prompts: MakePrompts, write_jsonl: Write, said: str
) -> None:
    prompts = make_prompts(2)
    fill(run, prompts)
    rows = [answered(prompts[0], model=said), answered(prompts[1], model="larger")]

    strict, lenient = (importing(write_jsonl(rows), trust_text=True, any_model=any_) for any_ in (False, True))

    assert (strict.imported, strict.refused) == (1, 1)
    assert (lenient.imported, lenient.already) == (1, 1)
    assert samples(run)[prompts[1].row_key].model == "larger"


def test_an_open_run_says_that_more_may_match_later(
    run: Run, importing: Import, make_prompts: MakePrompts, write_jsonl: Write, caplog: pytest.LogCaptureFixture
) -> None:
    prompts = make_prompts(8)
    run.write_prompts(batch_id("train", 0), prompts[:4])
    data = write_jsonl([answered(prompt) for prompt in prompts])

    with caplog.at_level(logging.WARNING):
        early = importing(data, trust_text=True)
    run.write_prompts(batch_id("train", 1), prompts[4:])
    run.seal({"prompts": 8})
    late = importing(data, trust_text=True)

    assert "the producer has not finished" in caplog.text
    assert (early.imported, early.unmatched) == (4, 4)
    assert (late.imported, late.already, late.unmatched) == (4, 4, 0)
