"""Writes docs/reference.md from the docstrings of verbs and public names: `python docs/reference.py`."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

import torchtrim
from torchtrim.cli.main import torchtrim as command_line

HERE = Path(__file__).parent
HEAD = """# Reference

[reference.py](reference.py) writes this page from the docstrings. `torchtrim VERB --help` has the same text
for a verb,
[schema](schema) the fields of JSON output, and [rules](rules/index.md) each finding.
"""


def page() -> str:
    """Return the whole page."""
    lines = [HEAD, "## Command line", "", *verbs(), "## Python", "", *names()]
    return "\n".join(lines).rstrip("\n") + "\n"


def verbs() -> Iterator[str]:
    """Yield the lines of each verb, with its arguments and options."""
    context = click.Context(command_line)
    for name in command_line.list_commands(context):
        verb = command_line.get_command(context, name)
        assert verb is not None
        arguments = [one.make_metavar(context) for one in verb.params if is_argument(one)]
        yield from (f"### `torchtrim {' '.join([name, *arguments])}`", "")
        yield from (inspect.cleandoc(verb.help or ""), "")
        options = [one for one in verb.params if isinstance(one, click.Option)]
        if options:
            yield from ("| option | |", "|---|---|", *map(option, options), "")


def is_argument(parameter: click.Parameter) -> bool:
    """True for a positional argument."""
    return isinstance(parameter, click.Argument)


def option(one: click.Option) -> str:
    """Return a row of the table."""
    named = ", ".join(f"`{name}`" for name in one.opts)
    return f"| {named} | {escaped(one.help or '')} |"


def names() -> Iterator[str]:
    """Yield each public name with its signature and docstring, and the public methods of classes."""
    for name in torchtrim.__all__:
        found = getattr(torchtrim, name)
        yield from (f"### `torchtrim.{name}{signature(found)}`", "")
        yield from (inspect.getdoc(found) or "", "")
        for method, function in methods(found):
            said = " ".join((inspect.getdoc(function) or "").split())
            yield f"* `.{method}{signature(function)}`: {said}"
        if any(methods(found)):
            yield ""


def methods(found: Any) -> list[tuple[str, Any]]:
    """Return the public functions that a class defines itself."""
    if not inspect.isclass(found):
        return []
    return [
        (name, value)
        for name, value in vars(found).items()
        if inspect.isfunction(value) and not name.startswith("_") and inspect.getdoc(value)
    ]


def signature(found: Any) -> str:
    """Return the names of the parameters, without types; empty if not callable."""
    if inspect.isclass(found) and issubclass(found, Exception):
        return ""
    try:
        parameters = inspect.signature(found).parameters.values()
    except (TypeError, ValueError):
        return ""
    shown, starred = [], False
    for one in parameters:
        if one.name == "self":
            continue
        if one.kind is one.KEYWORD_ONLY and not starred:
            shown, starred = [*shown, "*"], True
        plain = isinstance(one.default, (str, int, float, bool, type(None), tuple))
        default = f"={one.default!r}" if one.default is not one.empty and plain else ""
        mark = "*" if one.kind is one.VAR_POSITIONAL else ""
        starred = starred or bool(mark)
        shown.append(
            mark + one.name + (default or ("=..." if one.default is not one.empty else ""))
        )
    return f"({', '.join(shown)})"


def escaped(text: str) -> str:
    """Escape text for a cell."""
    return text.replace("|", "\\|").replace("\n", " ")


if __name__ == "__main__":
    (HERE / "reference.md").write_text(page(), encoding="utf-8")
