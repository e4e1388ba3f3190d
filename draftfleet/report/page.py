"""The page: the template filled in, its style and script inside it, and a policy that lets nothing else run.

The texts of samples are the model's, and hostile as far as the page is concerned. They stand in one place only, as JSON
in a block that no browser executes, and the script writes them as text. Everything else goes through the template's
escaping, strange characters made visible. The policy allows our script and style by their hashes, and no network.
"""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path
from typing import Any

from markupsafe import Markup

import draftfleet
from draftfleet.report import words

FOLDER = Path(__file__).parent
TEMPLATE, STYLE, SCRIPT = "page.html.j2", "page.css", "page.js"
FILTERS = ("number", "short", "duration", "moment", "clipped")


def render(**parts: Any) -> bytes:
    """The file. `samples` are the rows of the browser, as JSON."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # noqa: PLC0415

    environment = Environment(
        loader=FileSystemLoader(FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=words.shown,
    )
    environment.filters.update({name: getattr(words, name) for name in FILTERS})
    environment.globals["share"] = words.share  # pyright: ignore[reportArgumentType]  its own are all it knows
    style, script = (FOLDER / STYLE).read_text(), (FOLDER / SCRIPT).read_text()
    text = environment.get_template(TEMPLATE).render(
        **{name: value for name, value in parts.items() if name != "samples"},
        num_samples=len(parts["samples"]),
        data=as_json(parts["samples"]),
        style=Markup(style),
        script=Markup(script),
        policy=policy(style, script),
        version=draftfleet.__version__,
    )
    return text.encode(errors="replace")


def policy(style: str, script: str) -> str:
    """What the page may do: run this script, be drawn in this style, and nothing else."""
    return (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def as_json(value: object) -> Markup:
    """For a block of data inside HTML: in ASCII, so that no character of it means anything to a browser."""
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"))
    return Markup(text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e"))


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
