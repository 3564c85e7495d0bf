"""The command `torchtrim`. Finds the verbs, one per file, and turns errors into messages and exit codes."""

from __future__ import annotations

import contextlib
import importlib
import os
import pkgutil
import signal
import sys
import tomllib
from pathlib import Path
from typing import Any

import click

from torchtrim import __version__
from torchtrim.cli import verbs
from torchtrim.core import isolation as parts
from torchtrim.core.words import did_you_mean
from torchtrim.errors import ScriptFailed, TorchtrimError, UsageError, is_out_of_memory

CRASHED = 70
"""Exit code for a defect in torchtrim: EX_SOFTWARE of sysexits.h, which no verb returns otherwise."""
_MOST_BYTES = 2**22  # Arbitrary; bounds what a hostile file makes us read.
_FIRST = ("optimize", "run", "estimate", "diagnose", "verify", "lint", "undo", "explain")
_WHOLE = 200  # Arbitrary; no first sentence of a verb is as long.
_SETTINGS = ("memory", "memory_kind", "steps", "warmup", "timeout", "device", "out")


class Verbs(click.Group):
    """The group of verbs. Each file of `verbs/` defines a `command`, imported on first use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the verbs."""
        return [one.name.replace("_", "-") for one in pkgutil.iter_modules(verbs.__path__)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the verb of that name, or None."""
        if cmd_name not in self.list_commands(ctx):
            return None
        stem = cmd_name.replace("-", "_")
        command: click.Command = importlib.import_module(f"{verbs.__name__}.{stem}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the verbs with their whole first sentence, the most used first."""
        others = [name for name in self.list_commands(ctx) if name not in _FIRST]
        for heading, names in (("Commands", _FIRST), ("More commands", others)):
            found = ((name, self.get_command(ctx, name)) for name in names)
            rows = [
                (name, one.get_short_help_str(_WHOLE)) for name, one in found if one is not None
            ]
            with formatter.section(heading):
                formatter.write_dl(rows)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the verb and its arguments. Raises `UsageError` with the nearest verb for an unknown one."""
        names = self.list_commands(ctx)
        if args[0] not in names and not args[0].startswith("-"):
            question = did_you_mean(args[0], names, most=1, shown="`torchtrim {}`".format)
            raise UsageError(
                f"there is no command {args[0]!r}.{question} `torchtrim --help` lists all; to fit a script "
                "into memory: torchtrim optimize SCRIPT --memory 60%"
            )
        return super().resolve_command(ctx, args)


@click.group(
    cls=Verbs,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Start with: torchtrim optimize SCRIPT --memory 60%",
)
@click.version_option(__version__, prog_name="torchtrim")
@click.pass_context
def torchtrim(ctx: click.Context) -> None:
    """Fit a PyTorch program into a memory budget and prove that it still computes the same."""
    parts.forget()
    settings = _settings(Path.cwd())
    ctx.default_map = dict.fromkeys(Verbs.list_commands(ctx.command, ctx), settings)  # type: ignore[arg-type]


def main() -> None:
    """Run the command line and exit with its code."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        code = _run_verb()
        sys.stdout.flush()
    except click.exceptions.Exit as error:
        code = error.exit_code
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except (click.Abort, KeyboardInterrupt) as stop:
        _say_interrupted(stop)
        code = 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    except TorchtrimError as error:
        _show(error)
        code = error.exit_code
    except Exception as error:
        _say_defect(error)
        code = CRASHED
    finally:
        _say_writes()
    code = code if isinstance(code, int) else 0
    output = sys.modules.get("torchtrim.cli.output")
    is_lost = output is not None and output.is_lost()
    sys.exit(code or (CRASHED if is_lost else 0))


def _run_verb() -> Any:
    """Run the verb. What a script in this process has put in the place of stderr gets none of our errors."""
    own = sys.stderr
    try:
        return torchtrim.main(standalone_mode=False)
    except TorchtrimError:
        sys.stderr = own
        raise


def _say_defect(error: Exception) -> None:
    """Report a defect in torchtrim in two lines; add the traceback only on request."""
    full = (
        "This machine ran out of memory. Reduce the batch size, or use a machine with more memory."
    )
    advice = full if is_out_of_memory(error) else parts.TO_REPORT
    _say(
        f"{parts.trace_of(error)}\nerror: torchtrim failed: {parts.said_of(error)}.\n{advice}".strip()
    )


def _say_interrupted(stop: BaseException) -> None:
    """Report how far a verb came, what it knows, and what it wrote. click replaces Ctrl-C by an `Abort`."""
    working = sys.modules.get("torchtrim.cli.progress")
    where = working.interruption() if working is not None else ""
    _say(f"interrupted{where}")
    if not where:
        return
    from torchtrim.records.files import written

    for one in (stop, stop.__cause__):
        for fact in getattr(one, "__notes__", ()):
            _say(fact)
    files = ", ".join(dict.fromkeys(map(str, written)))
    if files:
        _say(f"written: {files}")
    elif not _say_writes():
        _say("nothing was written")


def _say_writes() -> bool:
    """Say which source was written, and return True if any was."""
    sources = sys.modules.get("torchtrim.cli.options")
    note = sources.writes_note() if sources is not None else ""
    if note:
        _say(note)
    return bool(note)


def _show(error: TorchtrimError) -> None:
    failed = error if isinstance(error, ScriptFailed) else None
    if failed is not None and failed.traceback:
        _say(failed.traceback.rstrip())
    _say("\n".join([f"error: {error}", *getattr(error, "__notes__", ())]))
    if failed is not None and failed.learnt:
        _say(failed.learnt)


def _say(text: str) -> None:
    from torchtrim.cli.output import cleaned

    with contextlib.suppress(BrokenPipeError):
        print("\n".join(map(cleaned, text.splitlines())), file=sys.stderr)


def _settings(folder: Path) -> dict[str, Any]:
    for candidate in (folder, *folder.parents):
        path = candidate / "pyproject.toml"
        if path.is_file():
            return _read_settings(path)
    return {}


def _read_settings(path: Path) -> dict[str, Any]:
    from torchtrim.records.files import read_bounded

    try:
        tables = tomllib.loads(read_bounded(path, _MOST_BYTES).decode())
    except (ValueError, RecursionError) as error:
        raise UsageError(f"cannot read {path}: {error}.") from None
    table = tables
    for name in ("tool", "torchtrim"):
        table = table.get(name, {})
        if not isinstance(table, dict):
            raise UsageError(
                f"{path} sets {name!r} to {table!r} where a table belongs. Write [tool.torchtrim] and "
                'below it lines such as memory = "60%".'
            )
    settings = {name.replace("-", "_"): value for name, value in table.items()}
    unknown = sorted(set(settings) - set(_SETTINGS))
    if unknown:
        raise UsageError(
            f"{path} sets {unknown[0]!r} under [tool.torchtrim], which is not a setting. Settings: "
            f"{', '.join(_SETTINGS)}."
        )
    for name, value in settings.items():
        if isinstance(value, bool | dict | list):
            raise UsageError(
                f"{path} sets {name!r} to {value!r} under [tool.torchtrim]; expected a string or a "
                f"number, as for --{name.replace('_', '-')}."
            )
    return {name: str(value) for name, value in settings.items()}
