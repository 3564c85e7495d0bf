"""Options and arguments that several verbs share."""

from __future__ import annotations

import functools
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click
from click.core import ParameterSource

from torchtrim.api import DEVICES
from torchtrim.cli.output import cleaned, formats, remember_call
from torchtrim.cli.script_options import unknown_option
from torchtrim.core.scripts import check_script_file
from torchtrim.core.units import check_bytes, check_unit, parse_bytes
from torchtrim.errors import UsageError
from torchtrim.records.commands import from_here, path_argument, plain_command
from torchtrim.records.terms import allowance

if TYPE_CHECKING:
    from torchtrim.api import Request, Script, Sharding, Watch
    from torchtrim.records.budget import MemoryKind
    from torchtrim.records.finding import Finding

F = TypeVar("F", bound=Callable[..., Any])
_MILLISECONDS = re.compile(r"\s*(\d+(?:\.\d+)?)\s*ms\s*")
_PERCENT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*%\s*")
Callback = Callable[[click.Context, click.Parameter, str | None], str | None]


def chosen_form(context: click.Context, _: click.Parameter, value: str | None) -> str:
    """Return the format chosen by `--format` or `--json`. Raises `UsageError` if they disagree."""
    as_json = bool(context.params.get("as_json"))
    if as_json and value not in (None, "json"):
        raise UsageError(
            f"--json is short for --format json, but --format {value} was given too. Give one of them."
        )
    return value or ("json" if as_json else "text")


@dataclass(frozen=True, kw_only=True)
class PriceLimit:
    """A limit of `--fail-on`: milliseconds, bytes or, if allowed, percent."""

    text: str
    ms: float | None = None
    bytes: int | None = None
    percent: float | None = None

    @classmethod
    def of(cls, text: str, *, share: bool = False) -> PriceLimit:
        """Parse `10ms`, `50MiB` or, with `share`, `5%`. Raises `UsageError` for anything else."""
        if match := _MILLISECONDS.fullmatch(text):
            return cls(text=text, ms=float(match[1]))
        if share and (match := _PERCENT.fullmatch(text)):
            return cls(text=text, percent=float(match[1]))
        return cls(text=text, bytes=parse_bytes(text))

    def reached_by(self, finding: Finding) -> bool:
        """Return True if the finding costs at least the limit."""
        by_time = self.ms is not None and (finding.price_ms or 0) >= self.ms
        return by_time or (self.bytes is not None and (finding.price_bytes or 0) >= self.bytes)


def amount(*, share: bool = False, zero: bool = False, of_a_step: bool = False) -> Callback:
    """Return an option callback that rejects an invalid amount of memory before the verb runs.

    `of_a_step`: reject numbers without a unit that no step fits into.
    """

    def check(context: click.Context, option: click.Parameter, value: str | None) -> str | None:
        try:
            if value is not None:
                check_bytes(value, share=share, zero=zero)
                if of_a_step:
                    check_unit(value)
        except UsageError as error:
            name = option.name or ""
            in_file = context.get_parameter_source(name) is ParameterSource.DEFAULT_MAP
            where = (
                f"{name} under [tool.torchtrim] of pyproject.toml" if in_file else option.opts[0]
            )
            raise UsageError(f"{where}: {error}") from None
        return value

    return check


_HEADINGS = {
    "Run": (
        *("module", "steps", "warmup", "processes", "timeout", "device", "streams"),
        *("frames", "frames_of"),
    ),
    "Budget": ("memory", "memory_kind", "host_memory", "allow", "pinned", "candidates"),
    "Sharding": (
        *("ranks", "fsdp", "fsdp_blocks", "fsdp_dtype", "fsdp_no_reshard", "fsdp_offload"),
    ),
    "Output": ("out", "no_source", "form", "as_json", "amount"),
}
"""Headings of `--help`, and the parameters below each. A verb's other options come first, as do the options
of the budget in a verb without --memory."""
_OWN = "Options"


class Verb(click.Command):
    """A verb whose `--help` groups its options under headings."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments. Raises `UsageError`, with advice, for a missing script or a wrong option."""
        words = [*args]
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            raise unknown_option(self, ctx.info_name or "", error.option_name, words) from None
        except click.MissingParameter as error:
            if error.param is None or error.param.name != "script":
                raise
            budget = " --memory 60%" if any(one.name == "memory" for one in self.params) else ""
            raise UsageError(
                f"{ctx.info_name} needs a script, as in: torchtrim {ctx.info_name} train.py{budget}"
            ) from None

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options, each below its heading."""
        parameters = self.get_params(ctx)
        heading_of = {name: heading for heading, names in _HEADINGS.items() for name in names}
        if not any(parameter.name == "memory" for parameter in parameters):
            heading_of |= dict.fromkeys(_HEADINGS["Budget"], _OWN)
        groups: dict[str, list[tuple[str, str]]] = {_OWN: [], **{key: [] for key in _HEADINGS}}
        for parameter in parameters:
            record = parameter.get_help_record(ctx)
            if record is not None and isinstance(parameter, click.Option):
                groups[heading_of.get(parameter.name or "", _OWN)].append(record)
        order = [*groups]
        if heading_of["memory"] == "Budget":
            order.sort(key="Budget".__ne__)  # it is what most come for
        for heading in order:
            if records := groups[heading]:
                with formatter.section(heading):
                    formatter.write_dl(records)


def _adds(*decorators: Callable[[Any], Any]) -> Callable[[F], F]:
    """Return a decorator that applies several, the first outermost: options appear in this order."""

    def decorate(function: F) -> F:
        for one in reversed(decorators):
            function = one(function)
        return function

    return decorate


def _warmed_up(function: F) -> F:
    """Wrap a verb so that the script's process imports torch while the verb starts."""

    @functools.wraps(function)
    def call(**options: Any) -> Any:
        from torchtrim.api import warm_up

        if not options["module"]:
            check_script_file(options["script"])
        path = None if options["module"] else Path(options["script"]).resolve()
        warm_up(path, options.get("device", "cpu"))
        return function(**options)

    return cast(F, call)


def ranks_asked(context: click.Context, value: int | None) -> int:
    """Return the number of ranks to run. Under torchrun, local rank 0 runs all of them and the others exit.

    Raises `UsageError` if `--processes` contradicts torchrun or torchrun spans several machines.
    """
    world = os.environ.get("WORLD_SIZE", "")
    if "LOCAL_RANK" not in os.environ or not world.isdecimal() or int(world) < 2:
        return value or 1
    if os.environ.get("LOCAL_WORLD_SIZE", world) != world:
        raise UsageError(
            f"torchrun runs {world} ranks on several machines, but torchtrim watches the ranks of one "
            "machine only. Run torchrun with --nnodes 1; fewer ranks show what each of them does just "
            "as well."
        )
    if value not in (None, int(world)):
        raise UsageError(
            f"--processes {value} contradicts torchrun, which runs {world} ranks. Leave --processes "
            "out."
        )
    if os.environ.get("RANK") != "0":
        context.exit(0)
    return int(world)


def _allowed(_: click.Context, __: click.Parameter, value: str) -> str:
    allowance(value)
    return value


_script = _adds(
    click.argument("script"),
    click.argument("args", nargs=-1),
    click.option("-m", "--module", is_flag=True, help="SCRIPT is a module name, as in python -m."),
)
_timeout = click.option(
    "--timeout",
    type=click.FloatRange(1.0),
    default=600.0,
    metavar="S",
    help="Time limit of one run, in seconds. Default: 600.",
)
_device = click.option(
    "--device",
    type=click.Choice(["cpu", "emulated", "cuda", *DEVICES]),
    metavar="DEVICE",
    help="Device to run on: cpu, cuda, emulated (a GPU emulated on this CPU), or the name of a GPU to "
    "emulate, such as a10g or h100. Default: the device that the script uses.",
)
_output = _adds(
    click.option(
        "--json",
        "as_json",
        is_flag=True,
        is_eager=True,
        help="Print the report as JSON; short for --format json.",
    ),
    click.option(
        "--format",
        "form",
        type=click.Choice(("text", *formats())),
        callback=chosen_form,
        help="Format of the output on stdout. Default: text.",
    ),
    click.option(
        "--verbose",
        "-v",
        "amount",
        flag_value="all",
        help="Print all findings in full, and every step of the work.",
    ),
    click.option(
        "--quiet",
        "-q",
        "amount",
        flag_value="headline",
        help="Print only the headline and the files written.",
    ),
)

# The groups of options, as decorators of verbs.
runs_script = _adds(
    _script,
    click.option(
        "--steps",
        type=click.IntRange(1, 1000),
        default=3,
        help="Number of steps to time and compare. Default: 3.",
    ),
    click.option(
        "--warmup",
        type=click.IntRange(0, 1000),
        default=1,
        help="Number of warm-up steps to run first. Default: 1.",
    ),
    click.option(
        "--processes",
        type=click.IntRange(1, 1024),
        callback=lambda context, _, value: ranks_asked(context, value),
        metavar="N",
        help="Run SCRIPT as N ranks on this machine, as torchrun does. Default under torchrun: its "
        "number of ranks.",
    ),
    _timeout,
    _device,
    _output,
    _warmed_up,
)
estimates_script = _adds(_script, _timeout, _device, _output, _warmed_up)
runs_stream = _adds(_script, _timeout, _output, _warmed_up)
orders_streams = click.option(
    "--streams",
    default="",
    metavar="ORDER",
    help="Order of the work on an emulated device's streams: early, late or random[:SEED], as far as the "
    "program's syncs allow. Default: immediately, in program order.",
)
counts_frames = _adds(
    click.option(
        "--frames", type=click.IntRange(6), default=60, help="Number of frames to run. Default: 60."
    ),
    click.option(
        "--frames-of",
        metavar="NAME",
        help="Class or function whose call is one frame. Default: the module that the script calls "
        "first.",
    ),
)
pins = click.option(
    "--plan",
    "pinned",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Plan with [pins] to obey; the new plan overwrites it. Default: the plan in the output folder.",
)
writes = _adds(
    click.option(
        "--out",
        type=click.Path(path_type=Path, file_okay=False),
        metavar="FOLDER",
        help="Folder to write files to. Default: torchtrim-out/SCRIPT.",
    ),
    click.option(
        "--no-source",
        is_flag=True,
        help="Leave source lines, paths and diffs out of the page.",
    ),
)
shards = _adds(
    click.option(
        "--ranks",
        type=click.IntRange(1, 1_000_000),
        metavar="N",
        help="Estimate rank 0 of N ranks without starting the others. A script written for torchrun "
        "works too.",
    ),
    click.option(
        "--fsdp", is_flag=True, help="Shard the model over the ranks with fully_shard (FSDP2)."
    ),
    click.option(
        "--fsdp-blocks",
        multiple=True,
        metavar="PATTERN",
        help="Modules to shard one by one, such as layers.*; may be repeated. Default: the modules "
        "that repeat.",
    ),
    click.option(
        "--fsdp-dtype",
        type=click.Choice(["bfloat16", "float16"]),
        help="Compute type of the sharded model. Gradients are reduced in float32.",
    ),
    click.option(
        "--fsdp-no-reshard",
        is_flag=True,
        help="Keep the gathered parameters of all blocks from forward to backward.",
    ),
    click.option(
        "--fsdp-offload",
        is_flag=True,
        help="Keep shards, their gradients and optimizer state in host memory.",
    ),
)


def fits(*, required: bool = True) -> Callable[[F], F]:
    """Add the options on the budget."""
    return _adds(
        click.option(
            "--memory",
            required=required,
            metavar="B",
            callback=amount(share=True, of_a_step=True),
            help="Memory budget: 8GiB, 500MB, or 60% of the original peak.",
        ),
        click.option(
            "--host-memory",
            metavar="B",
            callback=amount(zero=True),
            help="Host memory that a plan may use for offloaded tensors; the rest may go to files. "
            "Default: no limit, and no files.",
        ),
        click.option(
            "--allow",
            default="bitwise",
            callback=_allowed,
            metavar="WHAT",
            help="Changes that a plan may make: bitwise (none), rounding (the order of additions), or "
            "semantic=NAME,... (the function, by the named techniques, such as precision). Default: bitwise.",
        ),
        memory_kind("allocated", "reserved", "rss"),
    )


def memory_kind(*kinds: MemoryKind) -> Callable[[F], F]:
    """Add the option on the kind of memory that a budget limits and a percentage is of."""
    return click.option(
        "--memory-kind",
        type=click.Choice(kinds),
        default="allocated",
        help="Kind of memory that the budget limits and that peaks are given in. Default: allocated.",
    )


def sharding_of(options: dict[str, Any]) -> Sharding | None:
    """Return the options of `fully_shard`, if requested. Raises `UsageError` if `--fsdp` is missing."""
    from torchtrim.api import Sharding

    sharding = Sharding(
        blocks=tuple(options["fsdp_blocks"]),
        reshard=not options["fsdp_no_reshard"],
        compute=options["fsdp_dtype"] or "",
        offload=options["fsdp_offload"],
    )
    if sharding != Sharding() and not options["fsdp"]:
        raise UsageError("the --fsdp-... options describe the sharding of the model: add --fsdp.")
    if options["fsdp"] and not options["ranks"]:
        raise UsageError(
            "--fsdp shards the model over ranks: give their number, such as --ranks 8."
        )
    return sharding if options["fsdp"] else None


def script_of(options: dict[str, Any]) -> Script:
    """Return the script to run; first undo an interrupted write of its source."""
    from torchtrim.api import Script

    remember_call(options)
    script = Script(
        options["script"],
        tuple(options["args"]),
        options["module"],
        options.get("device", "cpu"),
        options["timeout"],
        options.get("streams", ""),
        options.get("processes", 1),
    )
    undo_interrupted(script.path or Path.cwd())
    return script


def request_of(options: dict[str, Any]) -> Request:
    """Return the request that the options describe."""
    from torchtrim.api import Request

    host = options.get("host_memory")
    return Request(
        steps=options["steps"],
        warmup=options["warmup"],
        host_memory=None if host is None else parse_bytes(host, zero=True),
    )


_watches: list[Watch] = []


def tell(text: str) -> None:
    """Print a line on stderr, without control characters."""
    click.echo(cleaned(text, sys.stderr.encoding or "utf-8"), err=True)


def undo_interrupted(start: Path) -> None:
    """Undo an interrupted write of source around a path, and print a note about it."""
    from torchtrim.api import settle

    for note in settle(start):
        tell(f"note: {note}")


def watch(start: Path) -> None:
    """Watch the source around a path, to report what this run wrote, however it ends."""
    from torchtrim.api import Watch

    _watches.append(Watch(start))


def writes_note() -> str:
    """Return a sentence on the source written since `watch`, with the command that undoes it, or ""."""
    lines = []
    for watched in _watches:
        paths = [str(from_here(path)) for path in watched.written()]
        if paths:
            count = "" if len(paths) == 1 else f"{len(paths)} files: "
            undo = plain_command("undo", path_argument(paths[0]))
            lines.append(f"source written: {count}{', '.join(paths)}. Undo: {undo}")
    _watches.clear()
    return "\n".join(lines)
