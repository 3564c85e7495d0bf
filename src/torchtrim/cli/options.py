"""Options and arguments that several verbs share."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click
from click.core import ParameterSource

from torchtrim.api import DEVICES
from torchtrim.cli.sources import put_right
from torchtrim.core.units import check_bytes, parse_bytes
from torchtrim.errors import UsageError
from torchtrim.records.allowance import allowance

if TYPE_CHECKING:
    from torchtrim.api import Request, Script, Sharding

FORMATS = ("text", "json", "sarif", "github", "markdown")
F = TypeVar("F", bound=Callable[..., Any])
Callback = Callable[[click.Context, click.Parameter, str | None], str | None]


def chosen_form(context: click.Context, _: click.Parameter, value: str | None) -> str:
    """The format of `--format` or `--json`. Raises `UsageError` where they say different things."""
    as_json = bool(context.params.get("as_json"))
    if as_json and value not in (None, "json"):
        raise UsageError(
            f"--json is short for --format json, and --format {value} says otherwise. Give one of them."
        )
    return value or ("json" if as_json else "text")


def amount(*, share: bool = False, zero: bool = False) -> Callback:
    """Return the callback of an option that takes an amount of memory: a wrong one ends the verb at once."""

    def check(context: click.Context, option: click.Parameter, value: str | None) -> str | None:
        try:
            if value is not None:
                check_bytes(value, share=share, zero=zero)
        except UsageError as error:
            raise UsageError(f"{_origin(context, option)}: {error}") from None
        return value

    return check


def _origin(context: click.Context, option: click.Parameter) -> str:
    """Where the value of an option was written."""
    source = context.get_parameter_source(option.name or "")
    if source is ParameterSource.DEFAULT_MAP:
        return f"{option.name} under [tool.torchtrim] of pyproject.toml"
    return option.opts[0]


_WHAT_RUNS = (
    click.argument("script"),
    click.argument("args", nargs=-1),
    click.option("-m", "--module", is_flag=True, help="SCRIPT is a module, as in python -m."),
)
_STEPS = (
    click.option(
        "--steps", type=click.IntRange(1, 1000), default=3, help="Steps timed and compared."
    ),
    click.option(
        "--warmup", type=click.IntRange(0, 1000), default=1, help="Steps run before that."
    ),
)
_PROCESSES = click.option(
    "--processes",
    type=click.IntRange(1, 1024),
    callback=lambda context, _, value: ranks_asked(context, value),
    metavar="N",
    help="Run SCRIPT as N ranks, as torchrun would on one machine; under torchrun as many as it says.",
)
_TIMEOUT = click.option(
    "--timeout",
    type=click.FloatRange(1.0),
    default=600.0,
    metavar="S",
    help="Seconds that one run may take.",
)
_DEVICE = click.option(
    "--device",
    type=click.Choice(["cpu", "emulated", "cuda", *DEVICES]),
    metavar="DEVICE",
    help="cpu, cuda, emulated (a GPU on this CPU), or the name of one to emulate, such as "
    "a10g or h100. By default what the script uses.",
)
_STREAMS = click.option(
    "--streams",
    default="",
    metavar="ORDER",
    help="In which order an emulated device's streams do their work: early, late or random[:SEED], each as "
    "far as the program's waits allow. By default at once.",
)
_SHOWN = (
    click.option(
        "--json",
        "as_json",
        is_flag=True,
        is_eager=True,
        help="The report as JSON, on stdout; short for --format json.",
    ),
    click.option(
        "--format",
        "form",
        type=click.Choice(FORMATS),
        callback=chosen_form,
        help="Format of stdout; text by default.",
    ),
    click.option(
        "--verbose",
        "-v",
        "amount",
        flag_value="all",
        help="All that was found, however long; each step of the work as it is done.",
    ),
    click.option(
        "--quiet",
        "-q",
        "amount",
        flag_value="headline",
        help="The headline and what was written; of the work nothing.",
    ),
)


def _warmed_up(function: F) -> F:
    """The verb; a process for the script imports torch while this one does."""

    @functools.wraps(function)
    def call(**options: Any) -> Any:
        from torchtrim.api import warm_up

        path = None if options["module"] else Path(options["script"]).resolve()
        warm_up(path, options.get("device", "cpu"))
        return function(**options)

    return cast(F, call)


def runs_script(function: F) -> F:
    """The script, its arguments, and how its steps are run."""
    function = _warmed_up(function)
    for decorate in reversed((*_WHAT_RUNS, *_STEPS, _PROCESSES, _TIMEOUT, _DEVICE, *_SHOWN)):
        function = decorate(function)
    return function


def ranks_asked(context: click.Context, value: int | None) -> int:
    """How many ranks are to run. Under torchrun its first rank sees to all, and the others are done.

    Raises `UsageError` where torchrun says otherwise, or runs ranks on other machines too.
    """
    world = os.environ.get("WORLD_SIZE", "")
    if "LOCAL_RANK" not in os.environ or not world.isdecimal() or int(world) < 2:
        return value or 1
    if os.environ.get("LOCAL_WORLD_SIZE", world) != world:
        raise UsageError(
            f"torchrun runs {world} ranks on several machines, and torchtrim watches those of one. Give "
            "--nnodes 1; to watch fewer ranks is enough to see what each does."
        )
    if value not in (None, int(world)):
        raise UsageError(
            f"--processes {value}, and torchrun runs {world} ranks. Leave --processes out."
        )
    if os.environ.get("RANK") != "0":
        context.exit(0)
    return int(world)


def orders_streams(function: F) -> F:
    """The order in which the streams of an emulated device work."""
    return _STREAMS(function)


def estimates_script(function: F) -> F:
    """The script, its arguments, and the device that it is estimated for."""
    function = _warmed_up(function)
    for decorate in reversed((*_WHAT_RUNS, _TIMEOUT, _DEVICE, *_SHOWN)):
        function = decorate(function)
    return function


def runs_stream(function: F) -> F:
    """The script, its arguments, and how its frames are run: on the CPU."""
    function = _warmed_up(function)
    for decorate in reversed((*_WHAT_RUNS, _TIMEOUT, *_SHOWN)):
        function = decorate(function)
    return function


def counts_frames(function: F) -> F:
    """How many frames, and what one is."""
    function = click.option(
        "--frames-of",
        metavar="NAME",
        help="A frame is a call of this class of module, or of this function; by default of the module "
        "called first.",
    )(function)
    return click.option(
        "--frames", type=click.IntRange(6), default=60, help="Frames of a stream; 60 by default."
    )(function)


def _allowed(_: click.Context, __: click.Parameter, value: str) -> str:
    """What a plan may change. Raises `UsageError` for an unknown word."""
    allowance(value)
    return value


def fits(*, required: bool = True) -> Callable[[F], F]:
    """The budget."""

    def decorate(function: F) -> F:
        function = click.option(
            "--memory-kind",
            type=click.Choice(["allocated", "reserved", "rss"]),
            default="allocated",
            help="What the budget is on.",
        )(function)
        function = click.option(
            "--allow",
            default="bitwise",
            callback=_allowed,
            metavar="WHAT",
            help="What a plan may change: bitwise, nothing at all; rounding, the order of additions; "
            "semantic=NAME,..., the function, by the techniques named, such as precision.",
        )(function)
        function = click.option(
            "--host-memory",
            metavar="B",
            callback=amount(zero=True),
            help="What a plan may take of the host's memory for what it offloads; what has no room there may "
            "go to files. By default all it wants, and no files.",
        )(function)
        return click.option(
            "--memory",
            required=required,
            metavar="B",
            callback=amount(share=True),
            help="The budget: 8GiB, 500MB, or 60% of the original.",
        )(function)

    return decorate


def pins(function: F) -> F:
    """The plan in which a person pins places."""
    return click.option(
        "--plan",
        "pinned",
        type=click.Path(path_type=Path, exists=True, dir_okay=False),
        metavar="FILE",
        help="A plan whose [pins] hold; it is written again. By default the one among the files, if there.",
    )(function)


def writes(function: F) -> F:
    """Where files go, and what the page shows."""
    function = click.option(
        "--no-source",
        is_flag=True,
        help="No lines of source, paths or diffs on the page.",
    )(function)
    return click.option(
        "--out",
        type=click.Path(path_type=Path, file_okay=False),
        metavar="FOLDER",
        help="Where files go; torchtrim-out/SCRIPT by default.",
    )(function)


_SHARDS = (
    click.option(
        "--ranks",
        type=click.IntRange(1, 1_000_000),
        metavar="N",
        help="Estimate one process of N. None is started, and a script of torchrun's runs as its first.",
    ),
    click.option(
        "--fsdp", is_flag=True, help="Shard the model over the ranks with fully_shard (FSDP2)."
    ),
    click.option(
        "--fsdp-blocks",
        multiple=True,
        metavar="PATTERN",
        help="The modules that are sharded one by one: layers.*; by default those that repeat. "
        "May be given again.",
    ),
    click.option(
        "--fsdp-dtype",
        type=click.Choice(["bfloat16", "float16"]),
        help="The type in which a sharded model computes; gradients are reduced in float32.",
    ),
    click.option(
        "--fsdp-no-reshard",
        is_flag=True,
        help="Keep the gathered parameters of all blocks from forward to backward.",
    ),
    click.option(
        "--fsdp-offload",
        is_flag=True,
        help="Keep shards, their gradients and optimizer state on the host.",
    ),
)


def shards(function: F) -> F:
    """Over how many ranks, and how a model is sharded over them."""
    for decorate in reversed(_SHARDS):
        function = decorate(function)
    return function


def sharding_of(options: dict[str, Any]) -> Sharding | None:
    """How the options have a model sharded. Raises `UsageError` where they speak of it without --fsdp."""
    from torchtrim.api import Sharding

    told = Sharding(
        blocks=tuple(options["fsdp_blocks"]),
        reshard=not options["fsdp_no_reshard"],
        compute=options["fsdp_dtype"] or "",
        offload=options["fsdp_offload"],
    )
    if told != Sharding() and not options["fsdp"]:
        raise UsageError("--fsdp-... says how a model is sharded: give --fsdp besides.")
    if options["fsdp"] and not options["ranks"]:
        raise UsageError("--fsdp shards over ranks: say how many, such as --ranks 8.")
    return told if options["fsdp"] else None


def script_of(options: dict[str, Any]) -> Script:
    """The script that the options name; a write of its source that was killed is put right."""
    from torchtrim.api import Script

    script = Script(
        options["script"],
        tuple(options["args"]),
        options["module"],
        options.get("device", "cpu"),
        options["timeout"],
        options.get("streams", ""),
        options.get("processes", 1),
    )
    put_right(script.path or Path.cwd())
    return script


def request_of(options: dict[str, Any]) -> Request:
    """The request that the options make."""
    from torchtrim.api import Request

    host = options.get("host_memory")
    return Request(
        steps=options["steps"],
        warmup=options["warmup"],
        host_memory=None if host is None else parse_bytes(host, zero=True),
    )
