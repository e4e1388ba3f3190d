"""What the documentation says is held against the code: pages, links, code blocks, command lines, words of errors."""

from __future__ import annotations

import ast
import importlib.util
import re
import shlex
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
import typer.main

from draftfleet import cli
from draftfleet.columns import SAMPLE_SCHEMA
from draftfleet.outcomes import Counts
from draftfleet.settings import load

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
TOML_FILES = sorted((ROOT / "examples").rglob("*.toml"))

TYPES = {"list of struct": "list", "list of int32": "list", "float64": "double"}
"""The page's word for an Arrow type where it is not Arrow's."""

VERBS = vars(typer.main.get_command(cli.app))["commands"]

by_name = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def blocks(page: Path, language: str) -> list[str]:
    """The code blocks of a page in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)


def prose(page: Path) -> str:
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """As GitHub makes them from headings."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@cache
def renderer() -> ModuleType:
    spec = importlib.util.spec_from_file_location("render", ROOT / "docs/render.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["settings.md", "architecture.md", "index.md"])
def test_a_page_made_from_the_code_is_current(name: str) -> None:
    written = (ROOT / "docs" / name).read_text()

    assert written == renderer().PAGES[name](), "run `make docs`"


@by_name
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)) if "://" not in link]

    for link in links:
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target), link


def test_every_page_can_be_reached_from_the_index() -> None:
    seen: set[Path] = set()
    waiting = [ROOT / "docs/index.md"]
    while waiting:
        page = waiting.pop()
        if page in seen:
            continue
        seen.add(page)
        for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", prose(page)):
            target = (page.parent / link).resolve()
            target = target / "README.md" if target.is_dir() else target
            if target.suffix == ".md" and target.exists():
                waiting.append(target)

    assert {page for page in PAGES if page.parent != ROOT} <= seen


@by_name
def test_python_blocks_compile(page: Path) -> None:
    for block in blocks(page, "python"):
        compile(block, str(page), "exec")


@by_name
def test_toml_blocks_are_settings(page: Path, tmp_path: Path) -> None:
    for block in blocks(page, "toml"):
        (tmp_path / "block.toml").write_text(block)
        load(tmp_path / "block.toml")


@pytest.mark.parametrize("path", TOML_FILES, ids=lambda path: path.name)
def test_example_settings_are_settings_that_say_more_than_the_defaults(path: Path) -> None:
    settings = load(path)

    assert settings.model_dump() != load().model_dump()
    assert tomllib.loads(path.read_text())


def command_lines(text: str) -> Iterator[list[str]]:
    """Every call of `draftfleet` in a shell text, as its arguments."""
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words[:1] == ["draftfleet"]:
            yield words[1:]
        elif words[:4] == ["docker", "compose", "run", "--rm"]:
            yield words[5:]
        elif words[1:3] == ["-m", "draftfleet"]:
            yield words[3 : words.index(">") if ">" in words else None]


def parses(args: list[str]) -> None:
    """Raises a usage error of the command line on an unknown verb or flag, or a value of the wrong kind."""
    verb, *rest = [word for word in args if word != "--debug"]
    assert verb in VERBS, f"no such verb: {verb}"
    group = getattr(VERBS[verb], "commands", None)
    if group is not None and rest:  # a verb of verbs
        assert rest[0] in group, f"no such verb: {verb} {rest[0]}"
        group[rest[0]].make_context(rest[0], rest[1:])
    else:
        VERBS[verb].make_context(verb, rest)


@by_name
def test_command_lines_name_verbs_and_flags_that_exist(page: Path) -> None:
    for block in blocks(page, "bash"):
        for args in command_lines(block):
            parses(args)


def test_the_look_at_command_lines_sees_what_is_wrong() -> None:
    found = list(command_lines("$ x\ndraftfleet work \\\n  --servers a  # why\npython -m draftfleet status --x > y\n"))

    assert found == [["work", "--servers", "a"], ["status", "--x"]]
    parses(found[0])
    with pytest.raises(AssertionError, match="no such verb: werk"):
        parses(["werk"])
    for wrong in (["work", "--server", "a"], ["train", "--max-steps", "many"]):
        with pytest.raises(Exception, match=r"No such option|valid integer"):
            parses(wrong)


@by_name
def test_verbs_and_flags_in_the_prose_exist(page: Path) -> None:
    for call in re.findall(r"`draftfleet ([^`]*)`", prose(page)):
        args = shlex.split(call)
        if not {"VERB", "NAME"} & set(args):
            parses(args)


@by_name
def test_make_targets_that_are_named_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = re.findall(r"`make ([a-z-]+)`", page.read_text())
    named += [
        line.split()[1] for block in blocks(page, "bash") for line in block.splitlines() if line.startswith("make ")
    ]

    assert set(named) <= targets


def test_the_samples_page_names_every_column_with_its_type_in_order() -> None:
    page = (ROOT / "docs/samples.md").read_text()
    columns = page.partition("## Columns")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \|", columns, re.MULTILINE)

    assert [name for name, _ in rows] == SAMPLE_SCHEMA.names
    for name, said in rows:
        kind = said.partition(",")[0].strip()
        assert TYPES.get(kind, kind) == re.sub(r"<.*", "", str(SAMPLE_SCHEMA.field(name).type)), name


def test_the_samples_page_names_every_field_of_a_message_and_of_the_footer() -> None:
    page = (ROOT / "docs/samples.md").read_text()

    for message_field in SAMPLE_SCHEMA.field("messages").type.value_type:
        assert f"`{message_field.name}`" in page
    assert ", ".join(field.name for field in fields(Counts)) in page
    assert 'load_dataset("parquet", data_files=' in page


@cache
def texts() -> list[str]:
    """Every text in the packages, with `…` for what is filled in."""
    found: list[str] = []
    for package in ("draftfleet", "producer", "workers", "trainer"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                match node:
                    case ast.JoinedStr(values=values):
                        found.append("".join(str(v.value) if isinstance(v, ast.Constant) else "…" for v in values))
                    case ast.Constant(value=str(text)):
                        found.append(text)
                    case _:
                        pass
    return found


ERRORS = re.findall(r"^### `(.*)`$", (ROOT / "docs/troubleshooting.md").read_text(), re.MULTILINE)


@pytest.mark.parametrize("words", ERRORS)
def test_the_words_of_an_error_are_those_of_the_program(words: str) -> None:
    pattern = re.compile(".*?".join(map(re.escape, words.split("…"))))

    assert any(pattern.search(text) for text in texts()), "the message has changed, or its page is wrong"


def logged(*levels: str) -> set[str]:
    """The words of all events that the packages log at these levels."""
    found: set[str] = set()
    for package in ("draftfleet", "producer", "workers", "trainer"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                match node:
                    case ast.Call(
                        func=ast.Attribute(attr=level),
                        args=[ast.Call(func=ast.Name("event"), args=[ast.Constant(value=str(words)), *_])],
                    ) if level in levels:
                        found.add(words)
                    case _:
                        pass
    return found


def test_every_warning_and_error_of_the_log_has_its_entry() -> None:
    told = set(re.findall(r"`([^`]+)`", " ".join(prose(ROOT / "docs/troubleshooting.md").split())))

    events = logged("warning", "error")

    assert len(events) > 50
    missing = sorted(events - told)
    assert not missing, f"give each a line in `Words of the log` of docs/troubleshooting.md: {missing}"


def test_what_the_log_is_said_to_say_it_says() -> None:
    table = (ROOT / "docs/troubleshooting.md").read_text().partition("## Words of the log")[2]
    told = {
        words for cell in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for words in re.findall(r"`(.*?)`", cell)
    }

    assert told <= logged("warning", "error", "exception", "info")


@by_name
def test_a_command_line_begins_with_a_program_that_is_known(page: Path) -> None:
    """So that no block escapes the looks above by a slip of its first word."""
    for block in blocks(page, "bash"):
        text = re.sub(r"<<\s*'?(\w+)'?.*?^\1$", "", block.replace("\\\n", " "), flags=re.DOTALL | re.MULTILINE)
        for line in text.splitlines():
            words = shlex.split(line, comments=True)
            while words and (re.match(r"\w+=", words[0]) or words[0] in ("for", "do")):
                words = words[1:]
            if words and words[0] not in ("gpu", "done"):
                assert Path(words[0]).name in PROGRAMS, line


PROGRAMS = {
    *("aws", "buildah", "cat", "cp", "curl", "docker", "draftfleet", "echo", "export", "head", "install", "kubectl"),
    *("llama-server", "make", "mkdir", "mmdebstrap", "openssl", "pip", "podman", "pre-commit", "printf", "python"),
    *("python3", "rsync", "sbatch", "sh", "source", "ssh", "sudo", "systemctl", "transformers", "useradd", "vllm"),
}
"""What a block of a page may call. A script of this repository counts by the program that runs it."""


def test_the_glossary_gives_each_word_of_the_field_one_meaning() -> None:
    page = (ROOT / "docs/glossary.md").read_text()
    words = [word for cell in re.findall(r"^\| ([^|]+) \| [A-Z]", page, re.MULTILINE) for word in cell.split(", ")]

    assert len(words) == len(set(words))
    assert set(WORDS) <= set(words)


WORDS = (
    *("run", "prompt", "sample", "batch", "claim", "attempt", "dead letter", "shard", "server", "dialect", "target"),
    *("verifier", "drafter", "algorithm", "hidden states", "loss mask", "acceptance length", "training-time test"),
    *("anchor", "block", "turn", "outcome", "drain"),
)
