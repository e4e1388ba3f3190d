"""Write the pages that are made from the code: `make docs`. A test holds them against it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from draftfleet import reference

ROOT = Path(__file__).parents[1]
PACKAGES = ("draftfleet", "producer", "workers", "trainer")
BEGIN, END = "<!-- modules: written by `make docs` -->", "<!-- end of modules -->"


def settings_page() -> str:
    return reference.as_markdown()


def architecture_page() -> str:
    """The page as it is, with its list of modules written anew."""
    text = (ROOT / "docs/architecture.md").read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{''.join(_module_list())}\n{END}{after}"


def _module_list() -> Iterator[str]:
    for package in PACKAGES:
        folder = ROOT / package
        yield f"### `{package}/` {_first_line(folder / '__init__.py')}\n\n"
        paths = [path for path in sorted(folder.rglob("*.py")) if path != folder / "__init__.py"]
        width = max(len(_name(path, folder)) for path in paths) if paths else 0
        yield "```text\n"
        yield from (f"{_name(path, folder):{width}}  {_first_line(path)}\n" for path in paths)
        yield "```\n\n" if package != PACKAGES[-1] else "```\n"


def _name(path: Path, folder: Path) -> str:
    name = str(path.relative_to(folder))
    return name.removesuffix("__init__.py") if path.name == "__init__.py" else name


def _first_line(path: Path) -> str:
    """The first sentence of a module's docstring, on one line."""
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    paragraph = " ".join(docstring.split("\n\n")[0].split())
    return re.split(r"(?<=[.!?]) (?=[A-Z`])", paragraph)[0].removesuffix(":")


def main() -> None:
    for name, text in {"settings.md": settings_page(), "architecture.md": architecture_page()}.items():
        (ROOT / "docs" / name).write_text(text)
        print(f"wrote docs/{name}")


if __name__ == "__main__":
    main()
