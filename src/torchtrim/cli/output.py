"""What a verb leaves: the report on the terminal or as JSON, and files."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchtrim.api import Result
    from torchtrim.records.report import Report


@contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """Tells of long work on stderr, where that is a terminal."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda _: None
        return
    with console.status("") as status:
        yield lambda text: status.update(text)


def folder_for(options: dict[str, Any]) -> Path:
    """The folder for a verb's files; it is made."""
    stem = Path(options["script"]).stem if not options["module"] else options["script"]
    folder: Path = options["out"] or Path("torchtrim-out") / stem
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def write_files(result: Result, folder: Path) -> dict[str, Path]:
    """Write the page, the report, the plan and the profile; their paths by what they are.

    `--no-source` of the running verb is about the page.
    """
    import click

    from torchtrim.records.files import save_plan, save_profile, write_atomically
    from torchtrim.report import html, json

    paths = {"page": folder / "report.html", "report": folder / "report.json"}
    context = click.get_current_context(silent=True)
    source = context is None or not context.params.get("no_source")
    page = html.render(result.report, result.before, result.after, source=source)
    write_atomically(paths["page"], page.encode())
    write_atomically(paths["report"], json.render(result.report))
    if result.report.cures is not None and result.report.cures.diff:
        paths["diff"] = folder / "cures.diff"
        write_atomically(paths["diff"], result.report.cures.diff.encode())
    if result.plan is not None:
        paths["plan"] = folder / "plan.toml"
        save_plan(result.plan, paths["plan"])
    if result.before is not None:
        paths["profile"] = folder / "profile.json"
        save_profile(result.before, paths["profile"])
    return paths


def show(
    result: Result, *, form: str, next_command: str | None, paths: dict[str, Path] | None = None
) -> None:
    """Print the report in one of the formats of `--format`."""
    if form != "text":
        sys.stdout.buffer.write(_rendered(result.report, form))
        return
    from rich.console import Console

    from torchtrim.report import terminal

    shown = {name: path for name, path in (paths or {}).items() if name in ("page", "plan", "diff")}
    terminal.render(result.report, Console(), next_command=next_command, paths=shown)


def _rendered(report: Report, form: str) -> bytes:
    from torchtrim.report import github, json, markdown, sarif
    from torchtrim.rules.source import Source

    if form == "json":
        return json.render(report) + b"\n"
    root = _root(report.project)
    if form == "sarif":
        return sarif.render(report, root=root, line_text=Source(report.project).line).encode()
    render = github.render if form == "github" else markdown.render
    return render(report, root=root).encode()


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
    words += [options["script"], *more]
    if options.get("device") and verb != "run":
        words += ["--device", options["device"]]
    if options["args"]:
        words += ["--", *options["args"]]
    return shlex.join(words)
