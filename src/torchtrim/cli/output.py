"""What a verb leaves: the report on the terminal or as JSON, and files."""

from __future__ import annotations

import importlib
import os
import re
import shlex
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from torchtrim.core.isolation import KINDS, failures, isolated
from torchtrim.errors import UsageError
from torchtrim.records.commands import path_argument

if TYPE_CHECKING:
    from torchtrim.api import Packing, Result
    from torchtrim.records.allow import PassedLimit
    from torchtrim.records.comparison import Change, Comparison
    from torchtrim.records.profile import Profile
    from torchtrim.records.report import Report
    from torchtrim.records.trace import TraceReport
    from torchtrim.report.terminal import Amount

T = TypeVar("T")
PLAN = "plan.toml"
_ON_STDOUT = " on stdout"


_DIGITS = re.compile(r"\d+")


class _Log:
    """A line with the time for each run that begins, and one whenever nothing was said for long.

    Work that is over at once says nothing.
    """

    quiet_seconds, most_silent_seconds = 2.0, 20.0

    def __init__(self, *, every: bool = False) -> None:
        self._every = every
        self._begun = self._said = time.monotonic()
        self._text = self._key = ""
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> _Log:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def tell(self, text: str) -> None:
        """Note what is done now; it is said if it is another run than before."""
        key = text.partition(": ")[0] if ": " in text else _DIGITS.sub("", text)
        with self._lock:
            new = self._every and text != self._text
            self._text = text
            if new:
                self._say()
            elif key != self._key and time.monotonic() - self._begun >= self.quiet_seconds:
                self._key = key
                self._say()

    def _watch(self) -> None:
        while not self._over.wait(self.most_silent_seconds / 20):
            with self._lock:
                if time.monotonic() - self._said >= self.most_silent_seconds:
                    self._say()

    def _say(self) -> None:
        self._said = time.monotonic()
        seconds = self._said - self._begun
        line = f"{time.strftime('%H:%M:%S')} {seconds:5.0f} s  {cleaned(self._text or 'at work')}"
        with suppress(OSError, ValueError):
            print(line, file=sys.stderr, flush=True)


@contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """Tells of long work on stderr: on a terminal in one line that changes, else line by line.

    With `--quiet` of the running verb it tells nothing, with `--verbose` all, line by line.
    """
    from rich.console import Console

    amount = _amount()
    if amount == "headline":
        yield lambda _: None
        return
    console = Console(stderr=True)
    if not console.is_terminal or amount == "all":
        with _Log(every=amount == "all") as log:
            yield log.tell
        return
    with console.status("") as status:
        yield lambda text: status.update(text)


def folder_for(options: dict[str, Any]) -> Path:
    """The folder for a verb's files, which is there only once something is written.

    Raises `UsageError` if it does not take files, before a run that could not be saved.
    """
    stem = Path(options["script"]).stem if not options["module"] else options["script"]
    folder: Path = options["out"] or Path("torchtrim-out") / stem
    made = [one for one in (folder, *folder.parents) if not one.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"?")
    except OSError as error:
        raise UsageError(
            f"cannot write into {folder}: {error.strerror or error}. Name another folder with --out."
        ) from None
    finally:
        for one in made:
            with suppress(OSError):
                one.rmdir()
    return folder


def plan_in(options: dict[str, Any], folder: Path) -> Path:
    """Where the plan of a verb that plans goes, and where a person's pins are, if there."""
    named: Path | None = options["pinned"]
    return named or folder / PLAN


def pins_in(plan: Path) -> dict[str, tuple[str, ...]]:
    """What a person pinned in a plan that may be there."""
    from torchtrim.records.files import load_pins

    return load_pins(plan) if plan.exists() else {}


def write_diff(folder: Path, diff: str) -> Path:
    """Write the diff of fixes; its path."""
    from torchtrim.records.files import write_atomically

    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "fixes.diff"
    write_atomically(path, diff.encode())
    return path


def write_files(result: Result, folder: Path, plan: Path | None = None) -> dict[str, Path]:
    """Write the page, the report, the plan and the profile; their paths by what they are.

    `plan`: where the plan goes, by default into the folder. What has to be drawn is written last.

    `--no-source` of the running verb is about the page.
    """
    import click

    folder.mkdir(parents=True, exist_ok=True)
    context = click.get_current_context(silent=True)
    source = context is None or not context.params.get("no_source")
    paths = _write_data(result, folder, plan)
    if result.ranks and (ranks := _write_ranks(result.ranks, folder, source)) is not None:
        paths["ranks"] = ranks
    return {**_write_report(result, folder, source), **paths}


def _write_data(result: Result, folder: Path, plan: Path | None) -> dict[str, Path]:
    """Write what needs no renderer: the diff, the plan, the certificate and the profile."""
    from torchtrim.records.certificate import save_certificate
    from torchtrim.records.files import save_plan, save_profile, write_atomically

    paths: dict[str, Path] = {}
    if result.report.fixes is not None and result.report.fixes.diff:
        paths["diff"] = write_diff(folder, result.report.fixes.diff)
    if result.plan is not None:
        paths["plan"] = plan or folder / PLAN
        save_plan(result.plan, paths["plan"])
    if result.exported:
        paths["exported"] = folder / "planned.py"
        write_atomically(paths["exported"], result.exported.encode())
    if result.certificate is not None:
        paths["certificate"] = folder / "certificate.json"
        save_certificate(result.certificate, paths["certificate"])
    if result.before is not None:
        paths["profile"] = folder / "profile.json"
        save_profile(result.before, paths["profile"])
    return paths


def _write_report(result: Result, folder: Path, source: bool) -> dict[str, Path]:
    """Write the page and the report, each where its renderer does not fail; their paths by what they are."""
    from torchtrim.records.files import write_atomically

    def page() -> bytes:
        report, profiles = _with_failures(result.report), (result.before, result.after)
        text: str = _renderer("html").render(report, *profiles, source=source)
        return text.encode()

    paths = {}
    for name, file, render in (
        ("page", "report.html", page),
        ("report", "report.json", lambda: _rendered(result.report, "json")),
    ):
        content = _attempted(file, render)
        if content is not None:
            paths[name] = folder / file
            write_atomically(paths[name], content)
    return paths


def _renderer(name: str) -> Any:
    """The module of a renderer, imported where it is used: one that cannot be imported has failed."""
    return importlib.import_module(f"torchtrim.report.{name}")


def _attempted(name: str, render: Callable[[], T]) -> T | None:
    """What a renderer gives; None where it fails."""
    found = None
    with isolated("renderer", name):
        found = render()
    return found


def _with_failures(report: Report) -> Report:
    """The report with what failed until now among its notes."""
    from msgspec.structs import replace

    known = (one for kind in KINDS for one in failures(kind))
    return replace(report, notes=(*map(str, known), *report.notes))


def is_lost() -> bool:
    """Whether the running verb could not print its result."""
    return any(one.name.endswith(_ON_STDOUT) for one in failures("renderer"))


def _write_ranks(profiles: Sequence[Profile], folder: Path, source: bool) -> Path | None:
    """Write the profile of each rank, and all of them as one trace; the trace's path, if there is one."""
    from torchtrim.records.files import save_profile, write_atomically

    for profile in profiles:
        save_profile(profile, folder / f"profile-rank{profile.rank}.json")
    path = folder / "ranks.trace.json"
    drawn: bytes | None = _attempted(
        path.name, lambda: _renderer("job_trace").render(profiles, source=source)
    )
    if drawn is not None:
        write_atomically(path, drawn)
    return path if drawn is not None else None


def show(
    result: Result, *, form: str, next_command: str | None, paths: dict[str, Path] | None = None
) -> None:
    """Print the report in one of the formats of `--format`."""
    if form != "text":
        rendered = _attempted(form + _ON_STDOUT, lambda: _rendered(result.report, form))
        sys.stdout.buffer.write(rendered or b"")
        return
    shown = {
        name: path
        for name, path in (paths or {}).items()
        if name in ("page", "plan", "exported", "diff", "ranks")
    }

    def text() -> bool:
        from rich.console import Console

        more = {"next_command": next_command, "paths": shown, "amount": _amount()}
        _renderer("terminal").render(_with_failures(result.report), Console(), **more)
        return True

    if not _attempted("text" + _ON_STDOUT, text):
        for path in shown.values():
            print(f"wrote {cleaned(str(path))}")


def _amount() -> Amount:
    """How much the running verb is asked to say."""
    import click

    context = click.get_current_context(silent=True)
    found: Amount | None = context.params.get("amount") if context is not None else None
    return found or "screen"


def _rendered(report: Report, form: str) -> bytes:
    from torchtrim.api import SourceLines

    report, render = _with_failures(report), _renderer(form).render
    if form == "json":
        encoded: bytes = render(report)
        return encoded
    more = {"line_text": SourceLines(report.project).line} if form == "sarif" else {}
    text: str = render(report, root=_root(report.project), **more)
    return text.encode()


def show_comparison(comparison: Comparison, form: str) -> None:
    """Print a comparison as text, JSON or Markdown."""
    from torchtrim.report import compare_text, json

    if form == "json":
        sys.stdout.buffer.write(json.render(comparison))
    elif form == "markdown":
        sys.stdout.buffer.write(compare_text.markdown(comparison).encode())
    else:
        from rich.console import Console

        compare_text.render(comparison, Console())


def said_of(change: Change) -> str:
    """By how much a figure changed, in words."""
    from torchtrim.report.compare_text import difference

    return difference(change)


def show_trace(report: TraceReport, top: int, next_command: str | None) -> None:
    """Print what a trace says."""
    from rich.console import Console

    from torchtrim.report import trace_text

    trace_text.render(report, Console(), top=top, next_command=next_command)


def drawn_arena(
    buffers: Sequence[Any], packing: Packing, title: str, capacity: int | None
) -> bytes | None:
    """The picture of a packing, as SVG; None where it cannot be drawn."""

    def svg() -> bytes:
        text: str = _renderer("arena").render(buffers, packing, title=title, capacity=capacity)
        return text.encode()

    return _attempted("arena", svg)


def gate_text(report: Report, over: Sequence[PassedLimit], allow_list: str) -> str:
    """What a gate says on the terminal."""

    def text() -> str:
        said: str = _renderer("gate").render(report, over, allow_list, sys.stdout.encoding)
        return said

    return _attempted("gate" + _ON_STDOUT, text) or ""


def rendered_lint(report: Report, form: str) -> str:
    """What lint found, in one of its formats."""
    from torchtrim.api import SourceLines
    from torchtrim.report import github, json, lint_text, sarif

    encoding = sys.stdout.encoding or "utf-8"
    if form == "json":
        return json.render(report).decode()
    if form == "sarif":
        return sarif.render(report, line_text=SourceLines(report.project).line)
    if form == "github":
        return github.render(report)
    return (
        lint_text.concise(report, encoding)
        if form == "concise"
        else lint_text.full(report, encoding)
    )


def lint_marks(report: Report) -> list[str]:
    """The mark of each finding of lint: whether it has a fix, and of which kind."""
    from torchtrim.report.lint_text import mark

    return [mark(found) for found in report.findings]


def is_over(report: Report) -> bool:
    """Whether the report's figures are over its budget."""
    from torchtrim.report.facts import over_budget

    return over_budget(report) > 0


def cleaned(text: str, encoding: str = "utf-8") -> str:
    """Text from outside, without what a terminal would obey."""
    from torchtrim.report.safe import clean

    return clean(text, encoding)


def _root(project: str) -> str:
    """The folder that paths are relative to: a checkout of GitHub's around the project, or the project."""
    checkout = os.environ.get("GITHUB_WORKSPACE", "")
    return checkout if checkout and Path(project).is_relative_to(checkout) else project


def _own_name() -> list[str]:
    """How this command was called, so that the next one can be called so too."""
    called = Path(sys.argv[0])
    if called.name == "__main__.py":
        return [Path(sys.executable).name, "-m", "torchtrim"]
    found = shutil.which("torchtrim")
    if found is not None and Path(found).resolve() == called.resolve():
        return ["torchtrim"]
    return [str(called)] if called.is_file() else ["torchtrim"]


def own_command(*words: str) -> str:
    """A command that is on no script."""
    return shlex.join([*_own_name(), *words])


def command_for(options: dict[str, Any], verb: str, *more: str) -> str:
    """A command on the same script. `run` takes no device: it runs the script as python would."""
    words = [*_own_name(), verb]
    if options["module"]:
        words.append("-m")
    script = options["script"]
    words += [script if options["module"] else path_argument(script), *more]
    if options.get("device") and verb != "run":
        words += ["--device", options["device"]]
    if options.get("processes", 1) > 1:
        words += ["--processes", str(options["processes"])]
    if options["args"]:
        words += ["--", *options["args"]]
    return shlex.join(words)
