"""Every command that a document, a page or a docstring names is one that the command line takes."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from torchtrim.cli.main import torchtrim

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "src/torchtrim/report").glob("*.jinja")),
    *sorted((ROOT / "src/torchtrim").rglob("*.py")),
    ROOT / "Makefile",
    ROOT / ".pre-commit-hooks.yaml",
]
FENCE = re.compile(r"^ *```\w*\n(.*?)^ *```$", re.M | re.S)
INLINE = re.compile(r"(?:`|<code>)torchtrim ([a-z][^`<]*)")
LINE = re.compile(r"^[\s@]*(?:- )?(?:run: |entry: |next +)?(?:\S*/)?torchtrim ([a-z][^\n]*)", re.M)
UNKNOWN = re.compile(r"\{|VERB|\.\.\.")


def commands(path: Path) -> Iterator[tuple[str, bool]]:
    """What follows `torchtrim`, and whether it is a whole command rather than a mention of one."""
    text = path.read_text(encoding="utf-8").replace("\\\n", " ")
    for match in INLINE.finditer(text):
        yield match[1], False
    if path.suffix == ".py" or path.suffix == ".jinja":
        return
    for fence in FENCE.finditer(text) if path.suffix == ".md" else [re.match("(?s)(.*)", text)]:
        assert fence is not None
        for match in LINE.finditer(fence[1]):
            yield match[1], path.suffix != ".yaml"


def check(command: str, *, whole: bool) -> None:
    """Parse a command as the command line does, and run nothing. Paths need not be there.

    Raises `click.ClickException` for a verb, an option or a value that there is none of.
    """
    verb, *words = shlex.split(re.split(r"[>|;&]", command)[0], comments=True)
    with click.Context(torchtrim) as group:
        found = torchtrim.get_command(group, verb)
        if found is None:
            raise click.UsageError(f"no verb {verb}")
    with click.Context(found, info_name=verb) as context:
        values, rest, _ = found.make_parser(context).parse_args(words)
        if rest:
            raise click.UsageError(f"{rest} is too much")
        for param in found.params:
            _take(param, context, values, whole)


def _take(param: click.Parameter, context: click.Context, values: dict, whole: bool) -> None:
    value, _ = param.consume_value(context, values)
    if isinstance(value, (str, tuple)) and not isinstance(param.type, (click.Path, click.File)):
        param.type_cast_value(context, value)
    if param.required and whole and param.value_is_missing(value):
        raise click.MissingParameter(param=param)


NAMED = sorted({(path, *found) for path in DOCUMENTS for found in commands(path)}, key=str)


def test_commands_are_found_in_every_sort_of_place() -> None:
    assert {path.suffix for path, *_ in NAMED} >= {".md", ".jinja", ".py"}
    assert sum(whole for *_, whole in NAMED) > 30
    assert len(NAMED) > 80


@pytest.mark.parametrize("path", sorted({path for path, *_ in NAMED}), ids=lambda path: path.name)
def test_every_command_is_one(path: Path) -> None:
    for where, command, whole in NAMED:
        if where == path and not UNKNOWN.search(command):
            try:
                check(command, whole=whole)
            except (click.ClickException, ValueError) as error:
                message = error.format_message() if hasattr(error, "format_message") else error
                pytest.fail(f"torchtrim {command}: {message}")


@pytest.mark.parametrize(
    "command",
    [
        "no-such-verb train.py",
        "diagnose",
        "diagnose train.py --no-such-option",
        "diagnose train.py --steps none",
        "diagnose train.py --device abacus",
        "compare one.json",
        "compare one.json two.json three.json",
    ],
)
def test_a_command_that_is_none_is_told(command: str) -> None:
    with pytest.raises(click.ClickException):
        check(command, whole=True)
