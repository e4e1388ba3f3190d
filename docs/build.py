"""Build the site from the pages: `make docs`, or `make docs-serve` to look at it while you write.

On a forge a page may link to any file of the repository; a site has only what was put into it. So every file that a
page links to, however far outside of docs/, becomes a page of the site under files/, and the links are written anew.
The pages themselves stay as they are. What is built needs no network and no server: it may be opened from its folder.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
CONFIG = DOCS / "zensical.toml"

FENCE = re.compile(r"^(`{3,}).*?^\1$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"(\]\()([^)\s#]+)([^)]*\))")
LANGUAGES = {".acl": "text", ".jinja": "jinja", ".py": "python", ".sh": "bash", ".yml": "yaml"}
"""Of a file that becomes a page, where its suffix is not the name already."""

MERMAID = "assets/mermaid.tiny.js"
"""It draws the diagrams. Large, so only the pages that have one load it."""


def pages_in(nav: list[object]) -> Iterator[str]:
    """The pages of a navigation, in its order."""
    for entry in nav:
        if isinstance(entry, str):
            yield entry
        elif isinstance(entry, dict):
            for inside in entry.values():
                yield from pages_in(inside if isinstance(inside, list) else [inside])


def navigation() -> list[str]:
    return list(pages_in(tomllib.loads(CONFIG.read_text())["project"]["nav"]))


def place(path: Path) -> str:
    """Where a file of the repository lies in the site."""
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS).as_posix()
    name = f"files/{path.relative_to(ROOT).as_posix()}"
    return name if path.suffix in (".md", ".png", ".svg") else f"{name}.md"


def source(name: str) -> Path:
    """The file of the repository that lies at this place in the site."""
    return ROOT / name.removeprefix("files/") if name.startswith("files/") else DOCS / name


def target(link: str, page: Path) -> Path:
    """The file that a link of a page leads to; for a folder, what it says of itself."""
    path = (page.parent / link).resolve()
    path = path / "README.md" if path.is_dir() else path
    if not path.is_file() or not path.is_relative_to(ROOT):
        raise SystemExit(
            f"{page.relative_to(ROOT)} links to {link!r}, which is no file here and no folder with a README.md"
        )
    return path


def links(text: str, page: Path) -> Iterator[Path]:
    """The files that the prose of a page links to."""
    for _, link, _ in LINK.findall(FENCE.sub("", text)):
        if "://" not in link and not link.startswith("mailto:"):
            yield target(link, page)


def rewritten(text: str, page: Path) -> str:
    """The page with its links as they are in the site."""
    here = Path(place(page)).parent

    def moved(match: re.Match[str]) -> str:
        before, link, after = match.groups()
        if "://" in link or link.startswith("mailto:"):
            return match.group()
        return before + os.path.relpath(place(target(link, page)), here) + after

    parts, end = [], 0
    for fence in FENCE.finditer(text):
        parts += [LINK.sub(moved, text[end : fence.start()]), fence.group()]
        end = fence.end()
    text = "".join([*parts, LINK.sub(moved, text[end:])])
    if "\n```mermaid\n" in text:
        text += f'\n<script src="{os.path.relpath(MERMAID, here)}"></script>\n'
    return text


def as_page(path: Path) -> str:
    """A file that is not Markdown, as a page that shows it."""
    language = LANGUAGES.get(path.suffix, path.suffix.removeprefix(".") or "text")
    return f"# {path.relative_to(ROOT)}\n\n``````{language}\n{path.read_text().rstrip()}\n``````\n"


def pages() -> dict[str, str | Path]:
    """By its place in the site: the text of each page, or the file that is taken as it is."""
    found: dict[str, str | Path] = {}
    waiting = [*sorted(DOCS.rglob("*.md")), *(source(name) for name in navigation())]
    waiting += [path for path in DOCS.rglob("*") if path.suffix in (".css", ".js", ".png", ".svg")]
    while waiting:
        path = waiting.pop()
        if place(path) in found:
            continue
        if path.suffix == ".md":
            text = path.read_text()
            found[place(path)] = rewritten(text, path)
            waiting += links(text, path)
        else:
            found[place(path)] = as_page(path) if place(path).endswith(".md") else path
    return found


def write(folder: Path) -> None:
    """The pages and the configuration, as Zensical takes them. A file that has not changed is left alone."""
    wanted = {folder / "pages" / name: content for name, content in pages().items()} | {folder / CONFIG.name: CONFIG}
    for path, content in wanted.items():
        data = content.read_bytes() if isinstance(content, Path) else content.encode()
        if not path.exists() or path.read_bytes() != data:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
    for path in (folder / "pages").rglob("*"):
        if path.is_file() and path not in wanted:
            path.unlink()


def build(folder: Path) -> None:
    """The site in `folder/site`. Ends the program where a link leads nowhere."""
    shutil.rmtree(folder / "site", ignore_errors=True)
    write(folder)
    command = [sys.executable, "-m", "zensical", "build", "--clean", "--strict", "-f", str(folder / CONFIG.name)]
    if code := subprocess.run(command, check=False).returncode:
        raise SystemExit(code)


def serve(folder: Path, address: str) -> None:
    """Until Ctrl-C. What is changed in docs/ is there after a second."""
    write(folder)
    command = [sys.executable, "-m", "zensical", "serve", "-f", str(folder / CONFIG.name), "--dev-addr", address]
    with subprocess.Popen(command) as server:
        try:
            while server.poll() is None:
                time.sleep(1)
                write(folder)
        except KeyboardInterrupt:
            server.terminate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, default=ROOT / "build", help="folder that gets the site; default: build")
    parser.add_argument("--serve", action="store_true", help="serve it until Ctrl-C, and follow what is changed")
    parser.add_argument("--address", default="127.0.0.1:8200", help="where to serve it; default: %(default)s")
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.to, arguments.address)
    else:
        build(arguments.to)
        print(f"built {arguments.to / 'site' / 'index.html'}")


if __name__ == "__main__":
    main()
