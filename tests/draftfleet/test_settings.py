"""One knob, three ways to set it, and what a person is told who sets it wrongly."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from draftfleet import reference
from draftfleet.errors import SettingsError
from draftfleet.settings import ENV_PREFIX, Settings, assignment, describe, environment, load


def test_flags_win_over_the_environment_which_wins_over_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "some.toml"
    file.write_text("[worker]\nconcurrency = 1\nmax_tries = 1\ndrain_s = 1\n")
    monkeypatch.setenv("DRAFTFLEET_WORKER__CONCURRENCY", "2")
    monkeypatch.setenv("DRAFTFLEET_WORKER__MAX_TRIES", "2")

    settings = load(file, flags={"worker.concurrency": 3})

    assert (settings.worker.concurrency, settings.worker.max_tries, settings.worker.drain_s) == (3, 2, 1)


def test_the_file_of_the_working_folder_is_read_unless_another_is_named(tmp_path: Path) -> None:
    (tmp_path / "draftfleet.toml").write_text('run = "here"\n')
    (tmp_path / "other.toml").write_text('run = "there"\n')

    assert load().run == "here"
    assert load("other.toml").run == "there"


def test_every_knob_has_a_description_and_a_default_that_it_accepts() -> None:
    settings = load()

    for path, field in describe():
        assert field.description, path
        assert field.description.endswith("."), path
        assert not field.is_required(), path
    assert Settings.model_validate(settings.model_dump()) is not None


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("worker.concurency", "unknown key worker.concurency; did you mean worker.concurrency?"),
        ("wroker.concurrency", "unknown key wroker"),
        ("concurrency", "unknown key concurrency; did you mean worker.concurrency?"),
        ("nothing.like.it", "unknown key nothing"),
    ],
)
def test_an_unknown_key_is_told_with_its_path_and_the_nearest_known(flag: str, said: str) -> None:
    with pytest.raises(SettingsError) as error:
        load(flags={flag: 1})

    assert said in str(error.value)
    assert "did you mean" in str(error.value) or "`draftfleet settings` lists every key" in str(error.value)


def test_an_unknown_key_in_the_file_and_in_the_environment_is_told_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "typo.toml").write_text("[trainer]\nmax_step = 1\n")
    with pytest.raises(
        SettingsError, match=r"^typo\.toml: unknown key trainer\.max_step; did you mean trainer\.max_steps"
    ):
        load("typo.toml")
    with pytest.raises(SettingsError, match=r"settings: unknown key trainer\.max_stepp; .*"):
        load(flags={"trainer.max_stepp": 1})
    (tmp_path / "draftfleet.toml").write_text("[samplng]\nmax_tokens = 1\n")
    with pytest.raises(SettingsError, match=r"^draftfleet\.toml: unknown key samplng; did you mean sampling\?$"):
        load()

    monkeypatch.setenv("DRAFTFLEET_TRAINER__MAX_STEP", "1")
    with pytest.raises(SettingsError, match=r"DRAFTFLEET_TRAINER__MAX_STEP: unknown key trainer\.max_step"):
        load()


@pytest.mark.parametrize("knob", ["run", "trainer.drafter"])
def test_a_name_that_is_not_allowed_is_told_with_what_is_and_no_pattern(knob: str) -> None:
    with pytest.raises(SettingsError) as error:
        load(flags={knob: "my run"})

    allowed = "letters, digits, . _ -, at most 100, beginning with a letter or digit"
    assert str(error.value) == f"settings: {knob} = 'my run': a name is {allowed}."


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"worker.concurrency": 0}, "worker.concurrency = 0"),
        ({"worker.concurrency": "many"}, "worker.concurrency = 'many'"),
        ({"worker.servers": "http://a:1"}, "worker.servers = 'http://a:1'"),
        ({"producer.heldout": 1.0}, "producer.heldout = 1.0"),
        ({"trainer.dtype": "float16"}, "trainer.dtype = 'float16'"),
        ({"run": "../elsewhere"}, "run = '../elsewhere'"),
        ({"worker": 5}, "worker = 5"),
        ({"run": "r", "run.deeper": 1}, "run.deeper"),
    ],
)
def test_a_value_that_is_not_allowed_is_told_with_its_path(flags: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingsError) as error:
        load(flags=flags)

    assert said in str(error.value)


def test_every_fault_is_told_at_once() -> None:
    with pytest.raises(SettingsError) as error:
        load(flags={"worker.concurrency": 0, "trainer.lr": -1})

    assert len(str(error.value).splitlines()) == 2


@pytest.mark.parametrize(
    ("raw", "said"),
    [(b"[worker\n", "is not TOML"), (b'run = "caf\xe9"\n', "0xe9")],
)
def test_a_file_that_is_no_toml_is_named(tmp_path: Path, raw: bytes, said: str) -> None:
    (tmp_path / "bad.toml").write_bytes(raw)

    with pytest.raises(SettingsError, match=r"bad\.toml") as error:
        load("bad.toml")

    assert said in str(error.value)


def test_a_file_that_is_not_there_is_named() -> None:
    with pytest.raises(SettingsError, match=r"gone\.toml is not there"):
        load("gone.toml")


@pytest.mark.parametrize(("name", "value"), [("WORKER__SERVERS", "http://a:1"), ("WORKER", "not json")])
def test_a_list_in_the_environment_that_is_no_json_is_told_with_how_to_write_it(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv("DRAFTFLEET_RUN", "not JSON either, and need not be")
    monkeypatch.setenv(ENV_PREFIX + name, value)

    with pytest.raises(SettingsError) as error:
        load()

    assert f"environment: {ENV_PREFIX}{name}:" in str(error.value)
    assert "JSON" in str(error.value)


def test_a_secret_is_not_repeated_in_an_error() -> None:
    with pytest.raises(SettingsError) as error:
        load(flags={"queue.url": ["hush"], "flower.password": ["hush"], "worker.api_key": ["hush"]})

    assert "hush" not in str(error.value)
    assert "queue.url" in str(error.value)


@pytest.mark.parametrize(
    ("text", "path", "value"),
    [
        ("worker.concurrency=48", "worker.concurrency", 48),
        ("trainer.lr=1e-3", "trainer.lr", 1e-3),
        ("producer.strict=true", "producer.strict", True),
        ('worker.servers=["http://a:1", "http://b:2"]', "worker.servers", ["http://a:1", "http://b:2"]),
        ("target.model=org/a model", "target.model", "org/a model"),
        ("target.path=models/a=b", "target.path", "models/a=b"),
    ],
)
def test_an_assignment_is_read_as_toml_and_as_plain_text_otherwise(text: str, path: str, value: Any) -> None:
    assert assignment(text) == (path, value)


def test_an_assignment_without_a_value_says_how_to_write_it() -> None:
    with pytest.raises(SettingsError, match=r"section\.key=value"):
        assignment("worker.concurrency")


def test_settings_travel_to_a_child_through_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = load(
        flags={
            "run": "r",
            "queue.url": "redis://:hush@localhost:1/0",
            "worker.servers": ["http://a:1"],
            "sampling.extra_body": {"top_k": 20, "nested": {"a": None}},
            "target.context_tokens": None,
            "trainer.layers": [1, 3, 4],
            "producer.sources": TWO,
        }
    )

    for name, value in environment(settings).items():
        monkeypatch.setenv(name, value)

    assert load().model_dump() == settings.model_dump()


def test_the_environment_of_a_child_holds_no_knob_of_the_parents(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = load()
    monkeypatch.setenv("DRAFTFLEET_WORKER__CONCURRENCY", "7")

    child = environment(settings)

    assert "DRAFTFLEET_WORKER__CONCURRENCY" not in child


def test_settings_cannot_be_changed_and_do_not_print_secrets() -> None:
    settings = load(flags={"worker.api_key": "hush"})

    with pytest.raises(ValueError, match="frozen"):
        settings.run = "other"  # pyright: ignore[reportAttributeAccessIssue]
    assert settings.worker.api_key == SecretStr("hush")
    assert "hush" not in repr(settings)


def test_the_target_is_asked_for_by_its_path_unless_it_has_another_name() -> None:
    assert load(flags={"target.path": "some/folder"}).model == "some/folder"
    assert load(flags={"target.path": "some/folder", "target.model": "served"}).model == "served"


TWO = [{"data": "a.jsonl", "weight": 2}, {"data": "b.jsonl", "weight": 1}]


def in_file(_: pytest.MonkeyPatch, entries: list[dict[str, Any]]) -> Settings:
    tables = ["".join(f"{key} = {json.dumps(value)}\n" for key, value in one.items()) for one in entries]
    Path("draftfleet.toml").write_text("".join(f"[[producer.sources]]\n{table}" for table in tables))
    return load()


def in_environment(monkeypatch: pytest.MonkeyPatch, entries: list[dict[str, Any]]) -> Settings:
    monkeypatch.setenv("DRAFTFLEET_PRODUCER__SOURCES", json.dumps(entries))
    return load()


def in_flag(_: pytest.MonkeyPatch, entries: list[dict[str, Any]]) -> Settings:
    tables = [", ".join(f"{key} = {json.dumps(value)}" for key, value in one.items()) for one in entries]
    text = ", ".join(f"{{{table}}}" for table in tables)
    return load(flags=dict([assignment(f"producer.sources=[{text}]")]))


Place = Callable[[pytest.MonkeyPatch, list[dict[str, Any]]], Settings]
in_each_place = pytest.mark.parametrize("place", [in_file, in_environment, in_flag])


@in_each_place
def test_a_list_of_tables_is_set_in_each_place(monkeypatch: pytest.MonkeyPatch, place: Place) -> None:
    assert [(one.data, one.weight) for one in place(monkeypatch, TWO).producer.sources] == [
        ("a.jsonl", 2),
        ("b.jsonl", 1),
    ]


@in_each_place
@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"wieght": 1}, "unknown key producer.sources[1].wieght; did you mean producer.sources[1].weight?"),
        ({"weight": -1}, "settings: producer.sources[1].weight = -1: Input should be greater than 0."),
        ({"weight": 0}, "settings: producer.sources[1].weight = 0: Input should be greater than 0."),
        ({"data": 4}, "settings: producer.sources[1].data = 4: Input should be a valid string.\n"),
        ({"keep": "("}, "settings: producer.sources[1].keep = '(': no regular expression of Python, missing ),"),
    ],
)
def test_a_fault_in_a_list_of_tables_is_told_with_its_place(
    monkeypatch: pytest.MonkeyPatch, place: Place, entry: dict[str, Any], said: str
) -> None:
    with pytest.raises(SettingsError) as error:
        place(monkeypatch, [TWO[0], entry])

    assert said in f"{error.value}\n"


def test_an_unknown_key_of_a_list_of_tables_names_the_file_it_stands_in(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SettingsError, match=r"^draftfleet\.toml: unknown key producer\.sources\[1\]\.wieght;"):
        in_file(monkeypatch, [TWO[0], {"wieght": 1}])


def test_one_entry_of_a_list_of_tables_cannot_be_set_by_itself() -> None:
    with pytest.raises(SettingsError, match=r"sources\[1\] cannot be set by itself.*--set 'producer\.sources=\["):
        load(flags=dict([assignment("producer.sources[1].weight=2")]))


def test_settings_written_out_are_settings_with_their_lists_of_tables(tmp_path: Path) -> None:
    settings = load(flags={"producer.sources": [{"data": ["a b", 'c"d']}, {"preset": "gsm8k", "languages": ["en"]}]})

    (tmp_path / "out.toml").write_text(reference.as_toml(settings))

    assert load("out.toml").model_dump() == settings.model_dump()


def test_every_key_of_a_list_of_tables_is_described() -> None:
    page, listed = reference.as_markdown(), json.loads(reference.as_json(load(flags={"producer.sources": TWO})))

    assert "## producer.sources\n" in page
    assert "| `producer.sources[].weight` | unset | number, > 0 |" in page
    assert listed["producer.sources"]["value"] == TWO
    assert listed["producer.sources[].weight"]["description"].startswith("Share of the prompts")


def test_a_list_that_may_be_one_text_is_written_as_one_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTFLEET_PRODUCER__DATA", "a.jsonl")
    assert load().producer.data == "a.jsonl"

    monkeypatch.setenv("DRAFTFLEET_PRODUCER__DATA", '["a.jsonl", "b.jsonl"]')
    assert load().producer.data == ["a.jsonl", "b.jsonl"]
