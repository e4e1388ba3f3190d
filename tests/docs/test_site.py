"""The site: every page has its place, no link is broken, and a browser reads it without a network."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType

import pytest
from playwright.sync_api import Browser, Page, expect

ROOT = Path(__file__).parents[2]
PATIENCE_MS = 60_000
WIDE, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}


@pytest.fixture(scope="module")
def builder() -> ModuleType:
    spec = importlib.util.spec_from_file_location("build", ROOT / "docs/build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("docs")
    command = [sys.executable, str(ROOT / "docs/build.py"), "--to", str(folder)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return folder / "site"


def test_every_page_is_in_one_section_of_the_navigation(builder: ModuleType) -> None:
    named = builder.navigation()
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}

    assert len(named) == len(set(named))
    missing = sorted(pages - set(named))
    assert not missing, f"in no section: give each its line in `nav` of docs/zensical.toml: {missing}"
    assert all(builder.source(name).is_file() for name in named)


def test_links_out_of_docs_lead_to_pages_of_the_site(builder: ModuleType) -> None:
    text = "[a](../examples/fleet.toml) [b](../examples/) `[c](../x)` [d](runs.md#priorities) [e](https://x.org)\n"
    fence = "```text\n[f](../x)\n```\n"
    page = ROOT / "docs/operations.md"

    with pytest.raises(SystemExit, match=r"operations.md links to '../examples/', which is no file"):
        builder.rewritten(text, page)
    moved = builder.rewritten(text.replace("[b](../examples/) `[c](../x)` ", "[b](decisions/) ") + fence, page)

    assert moved == (
        "[a](files/examples/fleet.toml.md) [b](decisions/README.md) [d](runs.md#priorities) [e](https://x.org)\n"
        + fence
    )


def test_a_file_of_the_repository_that_a_page_links_to_can_be_read_in_the_site(site: Path) -> None:
    page = (site / "files/examples/fleet.toml.html").read_text()

    assert "examples/fleet.toml" in page
    assert "/mnt/shared" in page


def test_a_link_that_leads_nowhere_ends_the_build(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "zensical.toml").write_text('[project]\nsite_name = "x"\n')
    (tmp_path / "docs/index.md").write_text("# x\n\n[y](y.md)\n")

    command = [sys.executable, "-m", "zensical", "build", "--strict", "-f", str(tmp_path / "zensical.toml")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    assert result.returncode != 0
    assert "page does not exist" in result.stdout + result.stderr


class Resources(HTMLParser):
    """What a browser fetches by itself to show a page."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag != "a":
            self.found += [value for name in ("src", "srcset", "data", "href") if (value := values.get(name))]


def test_nothing_is_fetched_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        resources = Resources()
        resources.feed(page.read_text())
        outside = [link for link in resources.found if re.match(r"(?:\w+:)?//", link)]
        assert not outside, page
    for style in site.rglob("*.css"):
        assert not re.findall(r"url\(\W*(?:https?:)?//", style.read_text()), style


@pytest.fixture
def reader(browser: Browser) -> Iterator[Page]:
    """A page that fails its test for a word in the console, and for a request beyond the folder."""
    with browser.new_context(viewport=WIDE, color_scheme="light") as context:  # type: ignore[arg-type]
        page = context.new_page()
        page.set_default_timeout(PATIENCE_MS)
        faults: list[str] = []
        page.on("console", lambda message: faults.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("request", lambda request: faults.append(request.url) if request.url.startswith("http") else None)
        yield page
        assert not faults


def test_a_reader_finds_the_way_by_the_navigation_and_by_the_search(reader: Page, site: Path) -> None:
    reader.goto((site / "index.html").as_uri())

    reader.get_by_role("navigation", name="Tabs").get_by_role("link", name="Guides").click()
    reader.get_by_role("navigation", name="Navigation").get_by_role("link", name="Troubleshooting").first.click()
    expect(reader.get_by_role("heading", level=1)).to_contain_text("Troubleshooting", timeout=PATIENCE_MS)

    reader.get_by_role("button", name="Search").click()
    reader.get_by_role("combobox", name="Search").fill("tombstone")
    reader.get_by_role("option").filter(has_text="Glossary").click()
    expect(reader.get_by_role("heading", level=1)).to_contain_text("Glossary", timeout=PATIENCE_MS)


def test_a_reader_may_have_it_light_or_dark(reader: Page, site: Path) -> None:
    reader.goto((site / "settings.html").as_uri())

    def lightness() -> float:
        color = reader.evaluate("getComputedStyle(document.body).backgroundColor")
        return sum(map(float, re.findall(r"[\d.]+", color)[:3])) / 3

    scheme = "data-md-color-scheme"
    light = lightness()
    reader.emulate_media(color_scheme="dark")
    expect(reader.locator("body")).to_have_attribute(scheme, "slate", timeout=PATIENCE_MS)
    dark = lightness()
    reader.get_by_title("Light").click()
    expect(reader.locator("body")).to_have_attribute(scheme, "default", timeout=PATIENCE_MS)

    assert light > 200
    assert dark < 60


def test_pages_fit_a_phone(reader: Page, site: Path) -> None:
    reader.set_viewport_size(PHONE)  # type: ignore[arg-type]
    for name in ("index", "settings", "security", "decisions/index"):
        reader.goto((site / f"{name}.html").as_uri(), wait_until="domcontentloaded")

        assert reader.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), name


def test_a_diagram_is_drawn(reader: Page, site: Path) -> None:
    reader.goto((site / "architecture.html").as_uri())

    diagram = reader.locator("div.mermaid")
    expect(diagram).to_be_visible(timeout=PATIENCE_MS)

    assert (diagram.bounding_box() or {})["height"] > 100
