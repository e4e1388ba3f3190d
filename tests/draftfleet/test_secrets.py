"""Where secrets come from, and where they never go."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from draftfleet import reference
from draftfleet.connection import address
from draftfleet.errors import SettingsError
from draftfleet.redaction import Formatter, redact, remember
from draftfleet.settings import assignment, environment, load

SECRET = "s3cret/w:rd@%20"


def test_every_secret_may_lie_in_a_file_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("url", "password", "key", "flower"):
        (tmp_path / name).write_text(f"{name}-{SECRET}\n")
    (tmp_path / "url").write_text("redis://worker@h:7/1\n")
    (tmp_path / "keys").write_text('"http://a:1/v1" = "key-of-a-server"\n')
    (tmp_path / "draftfleet.toml").write_text('[queue]\nurl_file = "url"\n[worker]\napi_keys_file = "keys"\n')
    monkeypatch.setenv("DRAFTFLEET_QUEUE__PASSWORD_FILE", "password")
    monkeypatch.setenv("DRAFTFLEET_WORKER__API_KEY_FILE", "key")

    settings = load(flags={"flower.password_file": "flower"})

    assert address(settings) == "redis://worker:password-s3cret%2Fw%3Ard%40%2520@h:7/1"
    assert settings.worker.key("http://a:1") == "key-of-a-server"
    assert settings.worker.key("http://b:1") == f"key-{SECRET}"
    assert settings.flower.password is not None
    assert settings.flower.password.get_secret_value() == f"flower-{SECRET}"


def test_a_child_reads_the_files_itself_and_gets_the_other_secrets_through_its_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "password").write_text(SECRET)
    (tmp_path / "draftfleet.toml").write_text('[worker.api_keys]\n"http://a:1" = "key-of-a-server"\n')
    settings = load(flags={"queue.url": "redis://h", "queue.password_file": "password"})

    given = environment(settings)
    assert SECRET not in json.dumps(given)
    (tmp_path / "draftfleet.toml").unlink()
    for name, value in given.items():
        monkeypatch.setenv(name, value)

    assert load().model_dump() == settings.model_dump()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, r"queue\.password_file = file cannot be read: No such file"),
        (b"", r"queue\.password_file = file is empty"),
        (b"\n", r"queue\.password_file = file is empty"),
        (b"\xff\xfe", "it is not UTF-8"),
    ],
)
def test_a_file_that_holds_no_secret_is_told_with_its_knob(tmp_path: Path, content: bytes | None, said: str) -> None:
    if content is not None:
        (tmp_path / "file").write_bytes(content)

    with pytest.raises(SettingsError, match=said):
        load(flags={"queue.password_file": "file"})


def test_a_secret_and_its_file_together_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text(SECRET)

    with pytest.raises(SettingsError, match=r"queue\.password and queue\.password_file are both set"):
        load(flags={"queue.password_file": "file", "queue.password": "another"})


@pytest.mark.parametrize("path", ["queue.password", "worker.api_key", "worker.api_keys", "flower.password"])
def test_a_secret_is_refused_as_a_flag_and_its_file_is_not(path: str) -> None:
    with pytest.raises(SettingsError, match=f"--set {path}_file=FILE") as error:
        assignment(f"{path}={SECRET}")

    assert SECRET not in str(error.value)
    assert assignment(f"{path}_file=file") == (f"{path}_file", "file")
    assert assignment("queue.url=redis://host:1/0") == ("queue.url", "redis://host:1/0")


@pytest.mark.parametrize(
    "text",
    [
        f'[queue]\npassword = ["{SECRET}"]',
        f'queue = "redis://:{SECRET}@h"',
        f'[worker]\napi_keys = "{SECRET}"',
        f'[worker]\napi_keys = {{"http://a:1" = ["{SECRET}"]}}',
        f'worker = ["{SECRET}"]',
        f'[worker]\nservers = "http://user:{SECRET}@h"',
    ],
)
def test_no_complaint_about_a_setting_repeats_a_secret(tmp_path: Path, text: str) -> None:
    (tmp_path / "draftfleet.toml").write_text(text)

    with pytest.raises(SettingsError) as error:
        load()

    assert SECRET not in str(error.value)
    assert "queue" in str(error.value) or "worker" in str(error.value)


def test_the_list_of_settings_shows_no_secret(tmp_path: Path) -> None:
    (tmp_path / "file").write_text(f"one-{SECRET}")
    settings = load(
        flags={
            "queue.url": f"redis://:{SECRET}@h:1/0",
            "worker.api_keys": {"http://a:1": SECRET},
            "worker.servers": [f"http://user:{SECRET}@a:1"],
            "flower.password_file": "file",
        }
    )

    for text in (reference.as_toml(settings), reference.as_json(settings)):
        assert SECRET not in text.replace("\\\\", "\\")
    assert "# api_keys = (secret)" in reference.as_toml(settings)
    assert 'password_file = "file"' in reference.as_toml(settings)


@pytest.mark.parametrize(
    "written",
    [
        "{}",
        "redis://user:{}@host:6379/0",
        "Error 111 connecting to rediss://:{}@host",
        "{{'password': '{}'}}",
        "Authorization: Bearer {}",
        "(secret) {} and {} again",
    ],
)
def test_a_secret_is_hidden_wherever_it_stands(written: str) -> None:
    for secret in ("word-known-1234", "wörd with/all:of@%20it\"s'", "back\\slash-word"):
        remember([secret])
        forms = [secret, repr(secret)[1:-1], json.dumps(secret)[1:-1], json.dumps(secret, ensure_ascii=False)[1:-1]]
        for form in forms:
            assert form not in redact(written.format(form, form))


def test_logins_and_tokens_nobody_told_of_are_hidden_too() -> None:
    assert redact("at redis://me:pw@h:1/0 now") == "at redis://***@h:1/0 now"
    assert redact("http://user:p@ss/w@host/x and http://plain/x@y") == "http://***@host/x and http://***@y"
    assert redact("Authorization: Bearer sk-abcdef123") == "Authorization: Bearer ***"
    assert redact("a basic question, a bearer of news") == "a basic question, a bearer of news"
    assert redact("mail me@example.org: 3 rows") == "mail me@example.org: 3 rows"


def test_short_words_are_not_taken_for_secrets() -> None:
    remember(["on", "", "redis"])

    assert redact("redis goes on") == "redis goes on"


def test_a_traceback_in_a_log_is_without_secrets() -> None:
    remember(["word-in-a-traceback"])
    try:
        raise ValueError("it was word-in-a-traceback")
    except ValueError as error:
        info = (type(error), error, error.__traceback__)
    record = logging.LogRecord("x", logging.ERROR, "", 0, "failed with %s", ("word-in-a-traceback",), info)

    line = Formatter("%(message)s").format(record)

    assert "failed with ***" in line
    assert "ValueError: it was ***" in line
    assert "word-in-a-traceback" not in line
