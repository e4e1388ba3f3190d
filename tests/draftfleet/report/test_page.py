"""The report as a browser shows it: whole, silent, without network, and with nothing of a sample taken for markup."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
from playwright.sync_api import Page, expect

from draftfleet import history, status
from draftfleet.accounting import Accountant
from draftfleet.history import Noted
from draftfleet.names import batch_id
from draftfleet.records import Prompt, Sample
from draftfleet.report import Options, report
from draftfleet.runs import Run
from draftfleet.settings import Settings
from draftfleet.testing.workers import changed

MakePrompts = Callable[..., list[Prompt]]
MakeSample = Callable[..., Sample]

TINY_TARGET = str(Path(__file__).parents[3] / "examples/tiny-target")
BEGUN = 1_796_000_000.0
SERVERS = ("http://127.0.0.1:8000", "http://127.0.0.1:8001")

HOSTILE = {
    "script": "<script>window.broken = 1</script>",
    "end of block": "</script><script>window.broken = 1</script>",
    "comment": "<!--<script>window.broken = 1",
    "handler": '<img src=x onerror="window.broken = 1"><svg onload="window.broken = 1">',
    "attribute": "\" onmouseover=\"window.broken = 1\" ' autofocus onfocus='window.broken = 1'",
    "link": "<a href=\"javascript:window.broken = 1\">click</a><iframe srcdoc='<script>parent.broken=1</script>'>",
    "entity": "&lt;script&gt;window.broken = 1&lt;/script&gt; &#60;b&#62;",
    "template": "{{ 7 * 7 }} {% for x in y %} ${7 * 7}",
    "separators": "line\u2028paragraph\u2029end",
    "directions": "left \u202eright to left\u202c \u2066isolated\u2069 zero\u200bwidth \ufeff",
    "controls": "null \x00 escape \x1b[31m bell \x07 delete \x7f",
    "astral": "🜁 𝒜 \U0010ffff",
    "long": "<b>" + "long " * 200_000,
}


@pytest.fixture
def filled(run: Run, make_prompts: MakePrompts, make_sample: MakeSample) -> Run:
    """Forty rows of two servers in five batches, one row truncated and one failed, all over two minutes."""
    prompts = [replace(one, source=("chat", "<i>code</i>")[at % 2]) for at, one in enumerate(make_prompts(40))]
    for number in range(5):
        name, some = batch_id("train", number), prompts[8 * number : 8 * number + 8]
        run.write_prompts(name, some)
        run.commit(name, [_sample(make_sample, one, name, 8 * number + at) for at, one in enumerate(some)])
    run.index.flush()
    run.seal({"prompts": 40})
    return run


def _sample(make_sample: MakeSample, prompt: Prompt, name: str, number: int) -> Sample:
    fields: dict[str, Any] = {"outcome": "ok", "reasoning": f"I think of {number}.", "reasoning_source": "field"}
    if number == 7:
        fields = {"outcome": "truncated", "finish_reason": "length"}
    if number == 23:
        fields = {"outcome": "failed", "error": "<b>refused</b>", "error_kind": "bad_request", "error_status": 400}
        fields |= {"token_ids": [], "ids_source": "none", "completion_tokens": -1, "content": None}
    times = {"started_at": BEGUN + 3 * number, "seconds": 2.0 + number / 10}
    said = {"server": SERVERS[number % 2], "worker": "node-1-aaaaaa", "source": prompt.source, "dialect": "vllm"}
    return make_sample(prompt, name, **times, **said, **fields)


@pytest.fixture
def write(settings: Settings, tmp_path: Path) -> Callable[..., str]:
    """Write the report; gives its address."""

    def written(**options: Any) -> str:
        file = tmp_path / "report.html"
        report(changed(settings, target__path=TINY_TARGET), Options(file=str(file), **options), progress=False)
        return file.as_uri()

    return written


@pytest.fixture
def watched(page: Page) -> Page:
    """A page of which every complaint and every request but its own fails the test."""
    page.on("console", lambda said: pytest.fail(f"console: {said.text}") if said.type == "error" else None)
    page.on("pageerror", lambda error: pytest.fail(f"script: {error}"))
    page.on("request", lambda asked: None if asked.url.startswith("file://") else pytest.fail(f"asked {asked.url}"))
    return page


def figures(page: Page) -> dict[str, str]:
    return dict(
        page.eval_on_selector_all("[data-figure]", "all => all.map(one => [one.dataset.figure, one.innerText])")
    )


def test_the_numbers_are_those_of_status(
    filled: Run, settings: Settings, write: Callable[..., str], watched: Page
) -> None:
    watched.goto(write(gpus_per_server=2, price=10))

    state = json.loads(json.dumps(status.collect(settings, Accountant(filled))))
    shown = figures(watched)
    names = ("expected", "ok", "truncated", "failed", "pending", "tokens")
    assert {name: shown[name] for name in names} == {name: f"{state[name]:,}" for name in names}
    assert (state["ok"], state["truncated"], state["failed"]) == (38, 1, 1)
    # Server 0 from row 0 to the end of row 38, 5.8 s; server 1 from row 1 to the end of row 39, 5.9 s: 2 GPUs each.
    hours = 2 * ((3 * 38 + 5.8) + (3 * 38 + 5.9)) / 3600
    assert float(shown["gpu-hours"]) == pytest.approx(hours, abs=0.001)
    assert float(shown["price"]) == pytest.approx(10 * hours, abs=0.01)
    assert "bad_request (400)" in watched.inner_text("#outcomes")
    assert "<b>refused</b>" in watched.inner_text("#outcomes")
    assert "<i>code</i>" in watched.inner_text("#outcomes")


def test_it_fits_a_screen_and_a_phone_in_both_colours(filled: Run, write: Callable[..., str], watched: Page) -> None:
    watched.goto(write())

    shades: dict[str, str] = {}
    schemes: tuple[Literal["light", "dark"], ...] = ("light", "dark")
    for scheme in schemes:
        watched.emulate_media(color_scheme=scheme)
        for width in (1280, 390):
            watched.set_viewport_size({"width": width, "height": 840})
            assert watched.evaluate("document.documentElement.scrollWidth") == width
        shades[scheme] = watched.evaluate("getComputedStyle(document.body).backgroundColor")
    toggled = set[str]()
    for _ in range(3):
        watched.click("#theme")
        toggled.add(watched.evaluate("getComputedStyle(document.body).backgroundColor"))

    assert (shades["light"], shades["dark"]) == ("rgb(251, 251, 249)", "rgb(21, 23, 26)")
    assert toggled == set(shades.values())


def test_the_keyboard_reaches_the_samples_and_the_figures_of_a_chart(
    filled: Run, write: Callable[..., str], watched: Page
) -> None:
    watched.goto(write())
    keyboard = watched.keyboard

    keyboard.press("Tab")
    assert watched.evaluate("document.activeElement.className") == "skip"
    keyboard.press("Enter")
    for _ in range(12):
        keyboard.press("Tab")
        if watched.evaluate("document.activeElement.closest('#list') !== null"):
            break
    first = watched.inner_text("#row h3")
    keyboard.press("ArrowDown")
    second = watched.inner_text("#row h3")
    watched.focus(".plot >> nth=0")
    keyboard.press("ArrowRight")

    assert first != second
    assert watched.get_attribute("#list li:nth-child(2) button", "aria-current") == "true"
    assert watched.inner_text("#tip b") == watched.evaluate("document.querySelector('.chart tbody td').textContent")


def test_samples_are_found_filtered_and_shown_token_by_token(
    filled: Run, write: Callable[..., str], watched: Page
) -> None:
    watched.goto(write())

    assert watched.locator("#list li").count() == 40
    watched.select_option("#by-outcome", "failed")
    assert watched.locator("#list li").count() == 1
    assert "no: it failed" in watched.inner_text("#row")
    assert "<b>refused</b>" in watched.inner_text("#row .error")
    watched.select_option("#by-outcome", "")
    watched.fill("#search", "I think of 12.")
    expect(watched.locator("#list li")).to_have_count(1)
    assert watched.inner_text("#row .reasoning") == "I think of 12."
    assert watched.inner_text("#row .answer") == "Answer."
    watched.click("#row .tabs button:has-text('Tokens')")
    kinds = watched.eval_on_selector_all("#row .token", "all => all.map(one => [one.className, one.title])")
    assert [title for _, title in kinds] == [f"id {token}" for token in (5, 6, 7, 8, 9, 2)]
    assert [("trained" in name) for name, _ in kinds] == [False] * 3 + [True] * 3


def test_nothing_in_a_sample_becomes_markup(
    run: Run,
    make_prompts: MakePrompts,
    make_sample: MakeSample,
    write: Callable[..., str],
    watched: Page,
    tmp_path: Path,
) -> None:
    prompts = make_prompts(len(HOSTILE))
    prompts = [
        replace(one, messages=[{"role": "<b>user</b>", "content": text}], source=text[:60])
        for one, text in zip(prompts, HOSTILE.values(), strict=True)
    ]
    samples = [
        make_sample(
            one, reasoning=text, content=text, tool_calls=[{"function": {"name": text[:80], "arguments": text[:80]}}],
            server=text[:80], worker="node-1-aaaaaa", started_at=BEGUN, seconds=1.0, source=text[:60],
        )
        for one, text in zip(prompts, HOSTILE.values(), strict=True)
    ]  # fmt: skip
    run.write_prompts(samples[0].batch, prompts)
    run.commit(samples[0].batch, samples)
    events = [Noted(at=BEGUN, event="worker <u>stops</u>", fields={"error": text[:200]}) for text in HOSTILE.values()]
    history.put(run, "node-1-aaaaaa", 0, events)

    watched.goto(write())
    shown: list[str] = []
    for number in range(len(HOSTILE)):
        watched.click(f"#list li:nth-child({number + 1}) button")
        shown.append(watched.inner_text("#row .text.answer >> nth=0"))

    assert watched.evaluate("window.broken") is None
    assert watched.locator("script").count() == 2
    foreign = (
        "iframe, img, u, main b:not(.counts b), a[href^=javascript], [onerror], [onload], [onfocus], [onmouseover]"
    )
    assert watched.eval_on_selector_all(foreign, "all => all.map(one => one.outerHTML)") == []
    assert any(text.startswith("<script>window.broken") for text in shown)
    assert "left ⟨U+202E⟩right to left⟨U+202C⟩ ⟨U+2066⟩isolated⟨U+2069⟩ zero⟨U+200B⟩width ⟨U+FEFF⟩" in shown
    assert "line⟨U+2028⟩paragraph⟨U+2029⟩end" in shown
    assert "null ⟨U+0000⟩ escape ⟨U+001B⟩[31m bell ⟨U+0007⟩ delete ⟨U+007F⟩" in shown
    assert any("characters are not shown" in text for text in shown)
    assert (tmp_path / "report.html").stat().st_size < 1_000_000


def test_half_a_surrogate_pair_is_shown_as_such(
    watched: Page, tmp_path: Path, filled: Run, write: Callable[..., str]
) -> None:
    """No shard can hold one; a tokenizer or another version might."""
    address = write()
    file = tmp_path / "report.html"
    file.write_text(file.read_text().replace("Answer.", "\\ud800 \\udc00\\ud800 \\ud83d\\ude00"))

    watched.goto(address)

    assert watched.inner_text("#row .answer") == "⟨U+D800⟩ ⟨U+DC00⟩⟨U+D800⟩ 😀"


def test_a_run_without_samples_and_without_a_record_says_so(run: Run, write: Callable[..., str], watched: Page) -> None:
    watched.goto(write())

    assert "There are no rows yet" in watched.inner_text("#overview")
    assert "There are no samples" in watched.inner_text("#samples")
    assert "not known" in watched.inner_text("#timeline")
    assert "target.model" in watched.inner_text("#origin")
    assert figures(watched)["expected"] == "–"


def test_the_record_of_the_nodes_is_drawn_and_told(filled: Run, write: Callable[..., str], watched: Page) -> None:
    def noted(seconds: float, event: str, **fields: Any) -> Noted:
        return Noted(at=BEGUN + seconds, event=event, fields=fields)

    ready = {"server": SERVERS[0], "limit": 4}
    limits = {"server": SERVERS[0], "limit": 8, "was": 4, "because": "it had room for more"}
    history.put(filled, "node-1-aaaaaa", 0, [
        noted(0, "server ready", **ready),
        noted(1, "worker started"),
        noted(30, "concurrency changed", **limits),
        noted(60, "waiting for server", server=SERVERS[0], state="away", reason="refused"),
        noted(90, "server ready", **ready),
        noted(130, "worker drained"),
    ])  # fmt: skip

    watched.goto(write())
    spans = watched.eval_on_selector_all("#timeline .span", "all => all.map(one => one.className.baseVal)")
    watched.click("#concurrency summary:has-text('decisions')")

    assert spans == ["span ready", "span away", "span ready"]
    assert "4 → 8: it had room for more" in watched.inner_text("#concurrency .events")
    assert "under a limit between 4 and 8" in watched.inner_text("#concurrency")
