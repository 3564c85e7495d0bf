"""The output of verbs: reports on the terminal or as JSON, and files."""

from __future__ import annotations

import importlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from torchtrim.core.isolation import KINDS, failures, isolated
from torchtrim.errors import TorchtrimError, UsageError
from torchtrim.records.commands import (
    Called,
    command,
    from_here,
    path_argument,
    quoted,
    remember,
)

if TYPE_CHECKING:
    from torchtrim.api import Packing, Result
    from torchtrim.records.allow import PassedLimit
    from torchtrim.records.comparison import Change, Comparison
    from torchtrim.records.profile import Profile
    from torchtrim.records.report import Report
    from torchtrim.records.snapshot_report import SnapshotReport
    from torchtrim.records.trace import TraceReport

T = TypeVar("T")
PLAN = "plan.toml"
OWN_FOLDER = Path("torchtrim-out")
_PLANNING = ("optimize", "plan")
NO_PLAN = ("missed", "unequal")
"""Kinds of results whose plan is not called `plan.toml`, since it misses its budget or computes otherwise."""
_ON_STDOUT = " on stdout"


def own_folder(options: dict[str, Any]) -> Path:
    """Return the folder of a script's files unless --out names another."""
    stem = Path(options["script"]).stem if not options["module"] else options["script"]
    return OWN_FOLDER / str(stem)


def folder_for(options: dict[str, Any]) -> Path:
    """Return the folder for a verb's files; it is created with the first file.

    Raises `UsageError` if it is not writable, before a run that could not be saved.
    """
    folder: Path = options["out"] or own_folder(options)
    created = [one for one in (folder, *folder.parents) if not one.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"?")
    except OSError as error:
        raise UsageError(
            f"cannot write into {folder}: {error.strerror or error}. Name another folder with --out."
        ) from None
    finally:
        for one in created:
            with suppress(OSError):
                one.rmdir()
    return folder


def plan_path(report: Report, folder: Path, plan: Path) -> Path:
    """Return where the report's plan is written: a name of its own unless it is `plan.toml`, and good."""
    return folder / f"{_prefix(report, folder)}{PLAN}" if plan == folder / PLAN else plan


def write_diff(folder: Path, diff: str) -> Path:
    """Write the diff of fixes, and return its path."""
    from torchtrim.records.files import write_atomically

    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "fixes.diff"
    write_atomically(path, diff.encode())
    return path


def write_files(result: Result, folder: Path, plan: Path | None = None) -> dict[str, Path]:
    """Write the page, the report, the plan and the profile, and return their paths by name.

    `plan`: path of the plan, by default in the folder. The page and the traces are written last.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _ignore(folder)
    source = not _parameter("no_source")
    prefix = f"{_kind(result.report)}-" if _outranked(result.report, folder) else ""
    path = plan_path(result.report, folder, plan or folder / PLAN)
    paths = _write_data(result, folder, path, prefix)
    if result.ranks and (ranks := _write_ranks(result.ranks, folder, source)) is not None:
        paths["ranks"] = ranks
    return {**_write_report(result, folder, source, prefix), **paths}


def followed(result: Result, command: str | None) -> Result:
    """Return the result with the next command in its report."""
    from msgspec.structs import replace

    return result._replace(report=replace(result.report, next=command or ""))


def _ignore(folder: Path) -> None:
    """Keep torchtrim's own folder out of git, as other tools do with theirs."""
    from torchtrim.records.files import write_atomically

    ignored = OWN_FOLDER / ".gitignore"
    if OWN_FOLDER in folder.parents and not ignored.exists():
        write_atomically(ignored, b"*\n")


def _kind(report: Report) -> str:
    """Return the word for a result that is less than a certified plan within its budget."""
    if report.floor_bytes is not None:
        return "missed"
    if report.verb in _PLANNING and report.certificate is not None and not _is_equal(report):
        return "unequal"
    return "untried" if report.verb == "plan" else report.verb


def _is_equal(report: Report) -> bool:
    proof = report.certificate
    return proof is not None and proof.verdict not in ("NOT EQUAL", "UNDECIDED")


def _prefix(report: Report, folder: Path) -> str:
    """Return the start of the name of a plan that is none, or less than the certified one of the folder."""
    kind = _kind(report)
    return f"{kind}-" if kind in NO_PLAN or _outranked(report, folder) else ""


def _outranked(report: Report, folder: Path) -> bool:
    """Return True in the folder of a certified plan, unless the result is one too, within its budget."""
    from torchtrim.records.files import load_plan

    if _is_equal(report) and report.verb in _PLANNING and report.floor_bytes is None:
        return False
    with suppress(TorchtrimError, OSError):
        return load_plan(folder / PLAN).certified is not None
    return False


def _write_data(result: Result, folder: Path, plan: Path, prefix: str) -> dict[str, Path]:
    from torchtrim.records.certificate import save_certificate
    from torchtrim.records.files import save_plan, save_profile, write_atomically

    paths: dict[str, Path] = {}
    if result.report.fixes is not None and result.report.fixes.diff:
        paths["diff"] = write_diff(folder, result.report.fixes.diff)
    if result.plan is not None:
        paths["plan"] = plan
        save_plan(result.plan, paths["plan"])
    if result.exported:
        paths["exported"] = folder / "planned.py"
        write_atomically(paths["exported"], result.exported.encode())
    if result.certificate is not None:
        paths["certificate"] = folder / "certificate.json"
        save_certificate(result.certificate, paths["certificate"])
    if result.before is not None:
        paths["profile"] = folder / f"{prefix}profile.json"
        save_profile(result.before, paths["profile"])
    return paths


def _write_report(result: Result, folder: Path, source: bool, prefix: str) -> dict[str, Path]:

    def page() -> bytes:
        report, profiles = _with_failures(result.report), (result.before, result.after)
        profile = quoted(str(from_here(folder / f"{prefix}profile.json")))
        text: str = _renderer("html").render(report, *profiles, source=source, profile=profile)
        return text.encode()

    files = {
        "page": folder / f"{prefix}report.html",
        "report": folder / f"{prefix}report.json",
    }
    drawn = {"page": page, "report": lambda: _rendered(result.report, "json")}
    return {name: path for name, path in files.items() if _drew(path, drawn[name])}


def _drew(path: Path, render: Callable[[], bytes]) -> bool:
    from torchtrim.records.files import write_atomically

    content = _attempted(path.name, render)
    if content is not None:
        write_atomically(path, content)
    return content is not None


def _renderer(name: str) -> Any:
    return importlib.import_module(f"torchtrim.report.{name}")


def _attempted(name: str, render: Callable[[], T]) -> T | None:
    rendered = None
    with isolated("renderer", name):
        rendered = render()
    return rendered


def _with_failures(report: Report) -> Report:
    from msgspec.structs import replace

    known = (one for kind in KINDS for one in failures(kind))
    return replace(report, notes=(*map(str, known), *report.notes))


def is_lost() -> bool:
    """Return True if the running verb could not print its result."""
    return any(one.name.endswith(_ON_STDOUT) for one in failures("renderer"))


def _write_ranks(profiles: Sequence[Profile], folder: Path, source: bool) -> Path | None:
    from torchtrim.records.files import save_profile

    for profile in profiles:
        save_profile(profile, folder / f"profile-rank{profile.rank}.json")
    path = folder / "ranks.trace.json"
    written = _drew(path, lambda: _renderer("job_trace").render(profiles, source=source))
    return path if written else None


def formats() -> tuple[str, ...]:
    """Return the formats for other programs, such as `json`."""
    from torchtrim.report.formats import names

    return names()


def show(
    result: Result, *, form: str, next_command: str | None, paths: dict[str, Path] | None = None
) -> None:
    """Print the report in one of the formats of `--format`."""
    if form != "text":
        rendered = _attempted(form + _ON_STDOUT, lambda: _rendered(result.report, form))
        sys.stdout.buffer.write(rendered or b"")
        return
    shown = paths or {}

    def text() -> bool:
        from rich.console import Console

        amount = _parameter("amount") or "screen"
        more = {"next_command": next_command, "paths": shown, "amount": amount}
        _renderer("terminal").render(_with_failures(result.report), Console(), **more)
        return True

    if not _attempted("text" + _ON_STDOUT, text):
        for path in shown.values():
            print(f"wrote {cleaned(str(path))}")


def _parameter(name: str) -> Any:
    import click

    context = click.get_current_context(silent=True)
    return context.params.get(name) if context is not None else None


def _rendered(report: Report, form: str) -> bytes:
    from torchtrim.api import SourceLines
    from torchtrim.report.formats import render

    line = SourceLines(report.project).line
    return render(form, _with_failures(report), line_text=line, root=_root(report.project))


def show_comparison(comparison: Comparison, form: str) -> None:
    """Print a comparison as text, JSON or Markdown."""
    from torchtrim.report import compare_text
    from torchtrim.report.formats import json

    if form == "json":
        sys.stdout.buffer.write(json.render(comparison))
    elif form == "markdown":
        sys.stdout.buffer.write(compare_text.markdown(comparison).encode())
    else:
        from rich.console import Console

        compare_text.render(comparison, Console())


def show_trace(report: TraceReport, top: int, next_command: str | None) -> None:
    """Print the analysis of a trace."""
    from rich.console import Console

    from torchtrim.report import trace_text

    trace_text.render(report, Console(), top=top, next_command=next_command)


def show_snapshot(report: SnapshotReport, top: int, *, on_stderr: bool = False) -> None:
    """Print the analysis of a memory snapshot, and the next command."""
    from rich.console import Console

    from torchtrim.report import snapshot_text

    snapshot_text.render(report, Console(stderr=on_stderr), top=top)


def write_snapshot_page(report: SnapshotReport, path: Path) -> bool:
    """Write the analysis of a memory snapshot as a page. Returns False if drawing fails."""
    from torchtrim.report import snapshot_page

    return _drew(path, lambda: snapshot_page.render(report).encode())


def drawn_arena(
    buffers: Sequence[Any], packing: Packing, title: str, capacity: int | None
) -> bytes | None:
    """Return a picture of the packing as SVG, or None if drawing fails."""

    def svg() -> bytes:
        text: str = _renderer("arena").render(buffers, packing, title=title, capacity=capacity)
        return text.encode()

    return _attempted("arena", svg)


def gate_text(report: Report, over: Sequence[PassedLimit], allow_list: str) -> str:
    """Return the text of a gate for the terminal."""
    text: str | None = _attempted(
        "gate" + _ON_STDOUT,
        lambda: _renderer("gate").render(report, over, allow_list, sys.stdout.encoding),
    )
    return text or ""


def rendered_lint(report: Report, form: str) -> str:
    """Return the report of `lint` in one of its formats."""
    from torchtrim.api import SourceLines
    from torchtrim.report import lint_text
    from torchtrim.report.formats import render

    if form in ("full", "concise"):
        written = lint_text.concise if form == "concise" else lint_text.full
        return written(report, sys.stdout.encoding or "utf-8")
    return render(form, report, line_text=SourceLines(report.project).line).decode()


def lint_marks(report: Report) -> list[str]:
    """Return the mark of each finding of `lint`, which shows whether its fix is safe or unsafe."""
    from torchtrim.report.lint_text import mark

    return [mark(finding) for finding in report.findings]


def change_words(change: Change) -> str:
    """Describe the change of a figure."""
    from torchtrim.report.compare_text import difference

    return difference(change)


def is_over(report: Report) -> bool:
    """Return True if the report's figures exceed its budget."""
    from torchtrim.report.facts import over_budget

    return over_budget(report) > 0


def cleaned(text: str, encoding: str = "utf-8") -> str:
    """Remove control characters, which a terminal would obey."""
    from torchtrim.report.safe import clean

    return clean(text, encoding)


def _root(project: str) -> str:
    checkout = os.environ.get("GITHUB_WORKSPACE", "")
    return checkout if checkout and Path(project).is_relative_to(checkout) else project


def _own_name() -> list[str]:
    called = Path(sys.argv[0])
    if called.name == "__main__.py":
        return [Path(sys.executable).name, "-m", "torchtrim"]
    found = shutil.which("torchtrim")
    if found is not None and Path(found).resolve() == called.resolve():
        return ["torchtrim"]
    return [str(called)] if called.is_file() else ["torchtrim"]


_REPEATED = (
    *("device", "processes", "steps", "warmup", "timeout", "streams", "mode", "out"),
    *("memory_kind", "host_memory", "allow"),
)
"""Options that a suggested command repeats, if its verb has them."""
_OF_A_BUDGET = ("memory_kind", "host_memory", "allow")


def called_by(options: dict[str, Any]) -> Called:
    """Return how a verb with these options was called, for commands on its script."""
    script = options["script"]
    words = ("-m", script) if options["module"] else (path_argument(script),)
    return Called(
        tuple(_own_name()),
        words,
        tuple(options["args"]),
        lambda verb: _repeated(options, verb),
        options.get("memory") or options.get("fits") or "",
    )


def remember_call(options: dict[str, Any]) -> None:
    """Have all commands that are suggested while this verb runs be on its script."""
    import click

    remember(called_by(options))
    context = click.get_current_context(silent=True)
    if context is not None:
        context.call_on_close(lambda: remember(None))


def _repeated(options: dict[str, Any], verb: str) -> Sequence[tuple[str, ...]]:
    """Return the given options that a verb takes too. Those of a budget go to verbs with a budget only."""
    import click

    name = f"{__package__}.verbs.{verb.replace('-', '_')}"
    parameters = importlib.import_module(name).command.params
    fits = "memory" in options and any(one.name == "memory" for one in parameters)
    names = [one for one in _REPEATED if fits or one not in _OF_A_BUDGET]
    words = []
    for one in parameters:
        value = options.get(one.name or "")
        given = one.name in names and value not in (None, "", one.default)
        alone = one.name == "processes" and value == 1
        if given and not alone and isinstance(one, click.Option):
            words.append((one.opts[0], f"{value:g}" if isinstance(value, float) else str(value)))
    return words


def command_for(options: dict[str, Any], verb: str, *more: str) -> str:
    """Return a command on the script of these options."""
    return command(verb, *more, how=called_by(options))
