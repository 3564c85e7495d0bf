"""Tuning of a script's loader, by running its own steps with other settings of the loader."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from msgspec.structs import replace

from torchtrim.data.rebuild import keywords_of, written
from torchtrim.errors import TorchtrimError, Unsupported
from torchtrim.records.loader import LoaderSettings, Tuning
from torchtrim.records.profile import is_emulated
from torchtrim.records.report import Result, TunedLoader
from torchtrim.records.trial import Request, Trial, TuningRequest
from torchtrim.rewriter.edits import diff_of
from torchtrim.rewriter.fix import TextEdit
from torchtrim.rewriter.replace import added_keyword
from torchtrim.rules.tt301_loader_wait import compared
from torchtrim.runner.script import Script, working_folder
from torchtrim.runner.trials import Progress, run_trial
from torchtrim.source.source import SourceFile, read_source
from torchtrim.workflows.findings import report_of


def tune_loader_report(
    script: Script, tunes: TuningRequest, *, progress: Progress = lambda _: None
) -> Result:
    """Return the cost of a script's loader, the best settings, and the line to change.

    Raises `Unsupported` if the script's steps use no `DataLoader`, or run on an emulated device.
    """
    request = Request(steps=1, measured=False, tunes=tunes)
    with working_folder() as folder:
        trial = run_trial(script, request, folder, progress)
    _check(trial)
    tuning = trial.tuning
    assert tuning is not None
    report = replace(
        report_of("tune-loader", script, trial),
        findings=tuple(compared(script.target, trial.loader)) if trial.loader else (),
        tuned=TunedLoader(
            tuning=tuning,
            step_seconds=trial.loader.step_seconds if trial.loader else 0.0,
            ready_seconds=trial.loader.ready_seconds if trial.loader else None,
            change=written(tuning.chosen, tuning.before),
            diff=diff_for(tuning, script.project),
        ),
    )
    return Result(report)


def _check(trial: Trial) -> None:
    if is_emulated(trial.device):
        raise Unsupported(
            "a step on an emulated device has no real time to tune a loader for. Run this on a machine with "
            "the GPU or, if the script also runs without a GPU, with --device cpu."
        )
    if trial.loader is None:
        raise Unsupported(
            "the script's steps took no batch from a torch.utils.data.DataLoader that could be tuned."
        )
    if trial.tuning is None:
        why = "its data set cannot be read apart from it."
        if trial.loader.parts is not None:
            why = (
                "the script ended before a setting was tried, or it keeps no reference to its loader. Let "
                "it run for more steps, and give the loader a name."
            )
        raise Unsupported(f"the loader could not be tuned: {why}")


def diff_for(tuning: Tuning, project: str | Path) -> str:
    """Return a diff of the line that creates the loader; empty if it cannot be changed there."""
    path = Path(tuning.path)
    if not tuning.path or tuning.chosen == tuning.before or tuning.chosen.whole:
        return ""
    try:
        text, _ = read_source(path)
        source = SourceFile(str(path), text)
    except (OSError, ValueError, TorchtrimError):
        return ""
    call = _call_at(source, tuning.line)
    edits = list(_edits(source, call, tuning.chosen)) if call is not None else []
    after = text
    for edit in sorted(edits, key=lambda one: one[:2], reverse=True):
        after = after[: edit.start] + edit.text + after[edit.end :]
    shown = path.relative_to(project) if path.is_relative_to(project) else path
    return diff_of(str(shown), text, after)


def _call_at(source: SourceFile, line: int) -> ast.Call | None:
    calls = (
        node
        for node in source.nodes
        if isinstance(node, ast.Call)
        and node.lineno <= line <= (node.end_lineno or line)
        and ast.unparse(node.func).endswith("DataLoader")
        and len(node.args) <= 2
        and all(word.arg is not None for word in node.keywords)
    )
    return next(calls, None)


def _edits(source: SourceFile, call: ast.Call, chosen: LoaderSettings) -> Iterator[TextEdit]:
    """Yield edits of the arguments that change, and of those that require workers."""
    given = {word.arg: word.value for word in call.keywords}
    wanted = keywords_of(chosen)
    added = []
    for name, default in (("persistent_workers", False), ("prefetch_factor", None)):
        if name in given:
            wanted.setdefault(name, default)
    for name, value in wanted.items():
        if name in given:
            yield TextEdit(source.start(given[name]), source.end(given[name]), repr(value))
        elif name != "prefetch_factor" or value != LoaderSettings().prefetch:
            added.append(f"{name}={value!r}")
    if added:
        yield added_keyword(source, call, ", ".join(added))
