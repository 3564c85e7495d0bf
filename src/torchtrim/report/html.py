"""A report as one HTML file: no network, readable without script, in the dark, on a phone, on paper."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from torchtrim.core.units import format_bytes, format_seconds
from torchtrim.records import Profile, Report
from torchtrim.records.files import without_collection
from torchtrim.report import facts, frontier, sentences, stages
from torchtrim.report.safe import clean, without_source
from torchtrim.report.views import CAPS, draw, view

_HERE = Path(__file__).parent
_MOST_BYTES = 450_000
_MOST_CHARACTERS = 400
_CODE = re.compile(r"`([^`]+)`")


def render(
    report: Report, before: Profile | None, after: Profile | None, *, source: bool = True
) -> str:
    """The page. `before` and `after` are the profiles to draw, where there are any.

    Without `source` the page holds no path, no script name, no line of source and no diff.
    """
    with without_collection():
        return _rendered(report, before, after, source)


def _rendered(report: Report, before: Profile | None, after: Profile | None, source: bool) -> str:
    shown = report if source else without_source(report)
    template = _environment().get_template("page.html.jinja")
    drawn = draw(shown, before, after)
    page = ""
    for caps in CAPS:
        page = template.render(view=view(shown, drawn, caps, source=source), report=shown)
        if len(page.encode()) <= _MOST_BYTES:
            break
    return page


def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(_HERE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_harmless,
    )
    environment.filters["typeset"] = _typeset
    environment.filters["marked"] = _marked
    script = (_HERE / "page.js").read_text(encoding="utf-8")
    environment.globals.update(
        script=Markup(script),
        policy=Markup(f"'sha256-{_sha256(script)}'"),
        facts=facts,
        sentences=sentences,
        stages=stages,
        trade=frontier.chart,
        bytes=format_bytes,
        seconds=format_seconds,
        css=Markup((_HERE / "page.css").read_text(encoding="utf-8")),
    )
    return environment


def _sha256(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _harmless(value: Any) -> Any:
    if isinstance(value, Markup) or not isinstance(value, str):
        return value
    text = clean(value[:_MOST_CHARACTERS])
    return text + "..." if len(value) > _MOST_CHARACTERS else text


def _marked(text: str) -> Markup:
    """Text with the parts between backticks as code."""
    parts = enumerate(_CODE.split(_harmless(text)))
    return Markup().join(
        Markup("<code>{}</code>").format(part) if at % 2 else Markup("{}").format(part)
        for at, part in parts
    )


def _typeset(text: str) -> str:
    """Arrows and signs as print has them; a figure and its percent sign stay in one line."""
    signs = text.replace("->", "\N{RIGHTWARDS ARROW}").replace("+-", "\N{PLUS-MINUS SIGN}")
    return signs.replace(" %", "\N{NO-BREAK SPACE}%")
