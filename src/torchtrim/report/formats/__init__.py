"""The formats of `--format`: each file of this folder is one, found by its name, and has a `render`."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchtrim.records import Report

LineText = Callable[[str, int], str]


def names() -> tuple[str, ...]:
    """Return the names of all formats, sorted."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)))


def render(name: str, report: Report, *, line_text: LineText, root: str = "") -> bytes:
    """Return the report in a format, as UTF-8.

    `line_text(path, line)` returns a line of source. Paths are relative to `root`, by default the project.
    """
    format = import_module(f"{__name__}.{name}")
    rendered: str | bytes = format.render(report, root=root, line_text=line_text)
    return rendered.encode() if isinstance(rendered, str) else rendered
