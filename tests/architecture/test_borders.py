"""The borders of the house, as data, held against every import statement, also those inside functions."""

from __future__ import annotations

import ast
import importlib.machinery
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("draftfleet", "producer", "workers", "trainer")
MAX_LINES = 350

MAY_IMPORT = {
    "draftfleet": {"draftfleet"},
    "producer": {"producer", "draftfleet"},
    "workers": {"workers", "draftfleet"},
    "trainer": {"trainer", "draftfleet"},
}
"""Roles import the contract, never each other. The contract imports no role: the command line names them as text."""

ENGINES = ("workers/", "draftfleet/testing", "trainer/targets/vllm/")
"""Who speaks to inference servers, or plays one."""

AT_HOME_IN = {
    "torch": ("trainer/",),
    "safetensors": ("trainer/",),
    "tensorboard": ("trainer/",),
    "wandb": ("trainer/trackers.py",),
    "transformers": ("trainer/", "draftfleet/tokens.py"),
    "openai": ENGINES,
    "httpx": ENGINES,
    "httpx2": ENGINES,
    "aiohttp": ENGINES,
    "datasets": ("producer/", "trainer/data.py", "draftfleet/export_data/formats/arrow.py"),
    "huggingface_hub": (
        "producer/sources/hub.py",
        "draftfleet/hub.py",
    ),
}
"""From package to the only places that may import it."""

ON_USE_ONLY = {
    ("draftfleet/tokens.py", "transformers"): "it brings half a second of imports, and torch where torch is installed",
    ("trainer/", "wandb"): "half a second of imports, and few name it",
    ("producer/", "datasets"): "most data sets are a file, which needs none of it",
    ("draftfleet/", "datasets"): "two seconds of imports, and one form of an export needs it",
    ("draftfleet/", "huggingface_hub"): "half a second of imports, and only an upload needs it",
}
"""Imports that must stand inside a function."""

NOT_A_NAME = ("utils", "util", "helpers", "helper", "common", "misc", "manager")


@dataclass(frozen=True)
class Import:
    file: str
    line: int
    module: str
    in_function: bool

    @property
    def top(self) -> str:
        return self.module.partition(".")[0]

    def __str__(self) -> str:
        return f"{self.file}:{self.line} imports {self.module}"


def modules() -> list[Path]:
    return sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def imports(source: str, file: str) -> Iterator[Import]:
    """Every import that can be executed: those for the type checker alone are not."""

    def walk(node: ast.AST, in_function: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            match child:
                case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                    continue
                case ast.Import(names=names, lineno=line):
                    yield from (Import(file, line, name.name, in_function) for name in names)
                case ast.ImportFrom(module=module, lineno=line, level=level):
                    name = module or ""
                    yield Import(file, line, f"{file.partition('/')[0]}.{name}" if level else name, in_function)
                case ast.FunctionDef() | ast.AsyncFunctionDef():
                    yield from walk(child, in_function=True)
                case _:
                    yield from walk(child, in_function)

    return walk(ast.parse(source), in_function=False)


@cache
def all_imports() -> list[Import]:
    return [one for path in modules() for one in imports(path.read_text(), str(path.relative_to(ROOT)))]


def test_the_look_itself_sees_imports_wherever_they_stand() -> None:
    source = (
        "import torch.nn as nn\n"
        "from producer.batches import x\n"
        "if TYPE_CHECKING:\n    import httpx\n"
        "class A:\n    async def f(self):\n        from datasets import load_dataset\n"
        "try:\n    import openai\nexcept ImportError: ...\n"
        "from . import neighbour\n"
    )

    seen = [(one.module, one.in_function) for one in imports(source, "workers/x.py")]

    assert seen == [
        ("torch.nn", False),
        ("producer.batches", False),
        ("datasets", True),
        ("openai", False),
        ("workers.", False),
    ]


def test_roles_import_the_contract_and_never_each_other() -> None:
    crossed = [
        str(one)
        for one in all_imports()
        if one.top in PACKAGES and one.top not in MAY_IMPORT[one.file.partition("/")[0]]
    ]

    assert not crossed


@pytest.mark.parametrize("package", AT_HOME_IN)
def test_a_heavy_package_is_imported_only_where_it_is_at_home(package: str) -> None:
    crossed = [str(one) for one in all_imports() if one.top == package and not one.file.startswith(AT_HOME_IN[package])]

    assert not crossed


@pytest.mark.parametrize(("place", "package"), ON_USE_ONLY)
def test_what_is_needed_rarely_is_imported_on_use(place: str, package: str) -> None:
    crossed = [
        str(one) for one in all_imports() if one.top == package and one.file.startswith(place) and not one.in_function
    ]

    assert not crossed, ON_USE_ONLY[place, package]


@pytest.mark.parametrize("name", PACKAGES)
def test_nothing_installed_beside_us_provides_our_top_level_names(name: str) -> None:
    elsewhere = [
        spec.origin or spec.submodule_search_locations
        for entry in sys.path
        if Path(entry or ".").resolve() != ROOT
        and (spec := importlib.machinery.PathFinder.find_spec(name, [entry])) is not None
        and spec.loader is not None
    ]

    assert not elsewhere, f"{elsewhere} would hide our {name}, or be hidden by it"


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_is_a_small_room_with_a_name_and_a_docstring(path: Path) -> None:
    source = path.read_text()

    assert len(source.splitlines()) <= MAX_LINES, "one idea a file: split it"
    assert path.stem not in NOT_A_NAME
    assert not path.stem.startswith("base_")
    assert ast.get_docstring(ast.parse(source)), "a module says in one line what it is"


def test_folders_that_are_no_packages_stay_so() -> None:
    """`docker/__init__.py` would hide the docker SDK; tests are imported by path."""
    wrong = [
        path for folder in ("docker", "tests", "examples", "docs") for path in (ROOT / folder).rglob("__init__.py")
    ]

    assert not wrong
