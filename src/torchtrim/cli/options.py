"""Options and arguments that several verbs share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from torchtrim.certify.trial import Request
    from torchtrim.observe.script import Script

F = TypeVar("F", bound=Callable[..., Any])


def runs_script(function: F) -> F:
    """The script, its arguments, and how it is run."""
    for decorate in reversed(
        (
            click.argument("script"),
            click.argument("args", nargs=-1),
            click.option(
                "-m", "--module", is_flag=True, help="SCRIPT is a module, as in python -m."
            ),
            click.option(
                "--steps", type=click.IntRange(1, 1000), default=3, help="Steps timed and compared."
            ),
            click.option(
                "--warmup", type=click.IntRange(0, 1000), default=1, help="Steps run before that."
            ),
            click.option(
                "--timeout",
                type=click.FloatRange(1.0),
                default=600.0,
                metavar="S",
                help="Seconds that one run may take.",
            ),
            click.option(
                "--device",
                type=click.Choice(["cpu", "emulated", "cuda"]),
                help="By default what the script uses. emulated: on CPU, judged as on an accelerator.",
            ),
            click.option("--json", "as_json", is_flag=True, help="The report as JSON, on stdout."),
        )
    ):
        function = decorate(function)
    return function


def fits(function: F) -> F:
    """The budget."""
    function = click.option(
        "--memory-kind",
        type=click.Choice(["allocated", "reserved", "rss"]),
        default="allocated",
        help="What the budget is on.",
    )(function)
    return click.option(
        "--memory",
        required=True,
        metavar="B",
        help="The budget: 8GiB, 500MB, or 60% of the original.",
    )(function)


def writes(function: F) -> F:
    """Where files go."""
    return click.option(
        "--out",
        type=click.Path(path_type=Path, file_okay=False),
        metavar="FOLDER",
        help="Where files go; torchtrim-out/SCRIPT by default.",
    )(function)


def script_of(options: dict[str, Any]) -> Script:
    """The script that the options name."""
    from torchtrim.observe.script import Script

    return Script(
        options["script"],
        tuple(options["args"]),
        options["module"],
        options["device"],
        options["timeout"],
    )


def request_of(options: dict[str, Any]) -> Request:
    """The request that the options make."""
    from torchtrim.certify.trial import Request

    return Request(steps=options["steps"], warmup=options["warmup"])
