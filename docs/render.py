"""Write the pages that are made from the code: `make docs`. A test holds them against it."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

from draftfleet import reference

ROOT = Path(__file__).parents[1]
PACKAGES = ("draftfleet", "producer", "workers", "trainer")
BEGIN, END = "<!-- written by `make docs` -->", "<!-- to here -->"


def settings_page() -> str:
    return reference.as_markdown()


def architecture_page() -> str:
    return _filled("architecture.md", "".join(_module_list()))


def index_page() -> str:
    """With all pages, by the sections of the site."""
    sections = tomllib.loads((ROOT / "docs/zensical.toml").read_text())["project"]["nav"]
    lines = (
        f"**{name}**: " + " · ".join(_link(page) for page in pages if page != "index.md") + "\n"
        for section in sections
        for name, pages in section.items()
    )
    return _filled("index.md", "\n".join(lines))


def _filled(name: str, content: str) -> str:
    """The page as it is, with what stands between the marks written anew."""
    before, _, rest = (ROOT / "docs" / name).read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    return f"{before}{BEGIN}\n\n{content}\n{END}{after}"


def _link(page: str) -> str:
    """From the index to a page of the site, which lies in docs/, or under files/ if it lies elsewhere."""
    link = page.replace("files/", "../")
    title = (ROOT / "docs" / link).read_text().splitlines()[0].removeprefix("# ")
    return f"[{title}]({link})"


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


PAGES = {"settings.md": settings_page, "architecture.md": architecture_page, "index.md": index_page}


def main() -> None:
    for name, page in PAGES.items():
        (ROOT / "docs" / name).write_text(page())
        print(f"wrote docs/{name}")


if __name__ == "__main__":
    main()
