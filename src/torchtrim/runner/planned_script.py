"""Run of a script in this process, with a plan applied to its models when they first run."""

from __future__ import annotations

import contextlib
import functools
import gc
import io
import os
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path, PurePath
from types import TracebackType
from typing import Any

import torch
from torch import nn

import torchtrim
from torchtrim.capture.modules import Modules
from torchtrim.capture.optimizers import names_of
from torchtrim.capture.watch import Listener, Watcher
from torchtrim.core.isolation import debugging
from torchtrim.dispatch.patches import Patches
from torchtrim.dispatch.threads import await_others, end_main, listen_to_errors, main_has_ended
from torchtrim.errors import ApplyFailed, TorchtrimError, UsageError
from torchtrim.executor.apply import apply_plan, fingerprint_of, is_unchanged
from torchtrim.executor.autograd import NotTwice
from torchtrim.executor.places import root_of
from torchtrim.executor.registry import Handles, check_known
from torchtrim.records.commands import from_here, plan_again
from torchtrim.records.plan import Plan
from torchtrim.runner.compiled_calls import CompiledCalls
from torchtrim.runner.compiling import Applying, OnCompile
from torchtrim.runner.joining import Spawning
from torchtrim.runner.processes import LIFELINE, end_with_parent
from torchtrim.runner.run_report import RunReport
from torchtrim.runner.script import Script
from torchtrim.runner.trials import Workload
from torchtrim.runner.worker import run_target

_EAGER = (
    "torchtrim: the script uses torch.compile; its compiled functions run eagerly, since the "
    "plan was made and certified that way. Without --plan they run compiled."
)
_OURS = f"{Path(torchtrim.__file__).parent}{os.sep}"


_SECONDS = 10.0
"""Arbitrary: how long the main thread may take to end for an error in another, which it may wait for."""


class EndOfScript(BaseException):
    """Ends a script that must not continue, with the error; no `except Exception` catches it."""

    def __init__(self, error: TorchtrimError) -> None:
        super().__init__(str(error))
        self.error = error


class Applier(Listener):
    """Applier of a plan to each root it names. After the last root it stops watching, unless it `stays`."""

    def __init__(self, plan: Plan, *, stays: bool = False) -> None:
        self.modules = Modules()
        self.watcher = Watcher(self, follows=True)
        self._plan = plan
        self._stays = stays or bool(plan.compiled)  # a compiled step of an optimizer runs no hook
        self._waits_for = {root_of(where) for one in plan.techniques for where in one.where}
        if plan.compiled:
            self._waits_for = {*plan.fingerprint}
        self._applied: list[Handles] = []
        self.report: RunReport | None = None
        self.error: BaseException | None = None

    def root_appears(self, root: nn.Module) -> None:
        name = self.modules.add_root(root)
        expected = self._plan.fingerprint.get(name)
        if expected not in (None, fingerprint_of(root)):
            raise EndOfScript(
                ApplyFailed(f"the plan was made for another {name}; plan again for this one.")
            )
        self._apply(name, root)

    def optimizer_appears(self, optimizer: torch.optim.Optimizer) -> None:
        known = self.watcher.optimizers
        self._apply(names_of(known)[known.index(optimizer)], optimizer)

    def _apply(self, name: str, root: nn.Module | torch.optim.Optimizer) -> None:
        try:
            self._applied.append(apply_plan(self._plan, {name: root}))
        except TorchtrimError as error:
            raise EndOfScript(error) from error
        self._waits_for.discard(name)
        if self.report is not None and isinstance(root, nn.Module):
            self.report.root_appears(name, root)
        if not self._waits_for and self.report is not None:
            self.report.applied(len(self.watcher.optimizers))
        if not self._waits_for and not self._stays:
            self.watcher.remove()

    def optimizer_ends(self, optimizer: torch.optim.Optimizer) -> None:
        if self._plan.compiled and self.report is not None:
            self.report.watch.optimizer_ends(optimizer)

    def revert(self) -> None:
        while self._applied:
            self._applied.pop().revert()
        if self.report is not None:
            self.report.reverted()

    def ended(self, error: BaseException | None) -> None:
        """Report the roots that never ran and updates without a `step`, after the script's end.

        Raises `EndOfScript` for such updates, unless the script itself has failed.
        """
        self.error = error
        well = error is None or (isinstance(error, SystemExit) and not error.code)
        if self._waits_for and well:
            names = ", ".join(sorted(self._waits_for))
            said = f"the plan left {names} unchanged, which the script never ran"
            if self.watcher.elsewhere:
                said += " in the thread that trains first, which is the planned one"
            print(f"torchtrim: {said}", file=sys.stderr, flush=True)
        try:
            self.check_settled()
        except EndOfScript as end:
            if error is None or isinstance(error, SystemExit):
                raise
            print(f"torchtrim: {end.error}", file=sys.stderr, flush=True)

    def check_settled(self) -> None:
        """Raise `EndOfScript` if the plan has updated parameters whose `step` has not been called."""
        try:
            for applied in self._applied:
                applied.check_settled()
        except ApplyFailed as error:
            raise EndOfScript(error) from error


def run_planned(
    script: Script,
    plan: Plan | None,
    applier: Applier | None = None,
    report: RunReport | None = None,
) -> None:
    """Run the script as `python` would, planned; the script's exceptions and exits pass through.

    `applier`: an `Applier` that does more than apply the plan. `report`: says what the plan did, on stderr.
    """
    if lifeline := os.environ.pop(LIFELINE, ""):
        end_with_parent(int(lifeline))
        world = int(os.environ.get("WORLD_SIZE", "1"))
        if world > 1:
            Spawning(world).install()
    if plan is not None and plan.pipeline is not None:
        _in_stages(script, plan, report)
        return
    if plan is None or not (plan.techniques or plan.compiled):
        if report is not None:
            report.start()
        try:
            _as_python(script)
        finally:
            flush_files()
        return
    Spawning(1).install()
    applier, patches = applier or Applier(plan), Patches()
    applier.report = report
    compiling = _compiling(plan, applier.watcher, report)
    compiling.install()
    listen_to_errors(patches, _ends_script)
    try:
        with applier.watcher, checked_saves(applier.check_settled):
            _as_python(script, applier.ended, passed=(ApplyFailed, NotTwice))
    except EndOfScript as end:
        applier.error = end.error
        raise end.error from None
    except (ApplyFailed, NotTwice) as error:
        raise ApplyFailed(str(error)) from None
    finally:
        main_has_ended()
        compiling.remove()
        patches.undo()
        flush_files()
        if report is not None:
            report.end(applier.error)
        if isinstance(compiling, Applying) and (missed := compiling.missed()):
            print(f"torchtrim: NOT FITTED: {missed}. Plan again.", file=sys.stderr, flush=True)


def _compiling(plan: Plan, watcher: Watcher, report: RunReport | None) -> Applying | OnCompile:
    """Return what becomes of the script's `torch.compile`."""
    if not plan.compiled:
        return OnCompile(_say_eager)
    calls = CompiledCalls(watcher, report.watch.called) if report is not None else None
    return Applying(plan.compiled, watcher, calls)


def _say_eager() -> None:
    print(_EAGER, file=sys.stderr, flush=True)


_BUFFERED = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)


def flush_files() -> None:
    """Flush the script's open files.

    An object that keeps the script alive to the end of the process, such as a graph that recomputes its
    modules, also keeps its files open.
    """
    for obj in gc.get_objects():
        if issubclass(type(obj), _BUFFERED):
            with contextlib.suppress(OSError, ValueError):
                obj.flush()


def _in_stages(script: Script, plan: Plan, report: RunReport | None) -> None:
    # Late, since torch's pipelining imports dynamo and inductor, which takes seconds.
    from torchtrim.runner.stage_worker import StageApplier, among_ranks

    assert plan.pipeline is not None
    stages = StageApplier(plan, several=True, refused=lambda said: EndOfScript(ApplyFailed(said)))
    watcher = Watcher(stages, follows=True)

    def applied() -> None:
        watcher.remove()
        if report is not None:
            report.start()

    stages.applied = applied
    with among_ranks(plan.pipeline), contextlib.closing(stages):
        try:
            with watcher:
                _as_python(script, passed=(TorchtrimError,))
        except EndOfScript as end:
            raise end.error from None


def _as_python(
    script: Script,
    ended: Callable[[BaseException | None], None] = lambda _: None,
    passed: tuple[type[BaseException], ...] = (),
) -> None:
    """Run the script, and exit as `python` does on an exception. `passed`: torchtrim's own exceptions."""
    try:
        try:
            try:
                run_target(script.command)
            finally:
                await_others()
        except BaseException as error:
            ended(error)
            raise
        ended(None)
    except passed:
        raise
    except (Exception, KeyboardInterrupt) as error:
        _show(error)
        sys.exit(130 if isinstance(error, KeyboardInterrupt) else 1)


def _show(error: BaseException) -> None:
    """Print the traceback that the script alone would have: without torchtrim's frames, unless debugging."""
    seen: set[int] = set()
    left = [error]
    while left and not debugging():
        one = left.pop()
        if id(one) not in seen:
            seen.add(id(one))
            one.with_traceback(_without_ours(one.__traceback__))
            left += filter(None, (one.__cause__, one.__context__))
    sys.excepthook(type(error), error, error.__traceback__)


def _without_ours(trace: TracebackType | None) -> TracebackType | None:
    """Return the traceback without torchtrim's frames; as it is, if it has no others."""
    kept: TracebackType | None = None
    for one in reversed(list(_entries(trace))):
        path = one.tb_frame.f_code.co_filename
        if not path.startswith((_OURS, "<frozen runpy")) and path != runpy.__file__:
            kept = TracebackType(kept, one.tb_frame, one.tb_lasti, one.tb_lineno)
    return kept or trace


def _entries(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next


@contextlib.contextmanager
def checked_saves(check: Callable[[], None]) -> Iterator[None]:
    """Call `check` before each `state_dict` of a module and each `torch.save`; it raises to stop them.

    A planned backward may update parameters before `step`. If Ctrl-C or an exception comes in between, and
    one of the program's handlers saves the weights, they differ from the original's.
    """
    patches = Patches()
    for owner, name in ((nn.Module, "state_dict"), (torch, "save")):
        patches.replace(owner, name, _checked(getattr(owner, name), check))
    try:
        yield
    finally:
        patches.undo()


def _checked(original: Callable[..., Any], check: Callable[[], None]) -> Callable[..., Any]:
    @functools.wraps(original)
    def checked(*args: Any, **kwargs: Any) -> Any:
        check()
        return original(*args, **kwargs)

    return checked


def _ends_script(error: BaseException) -> bool:
    """End the script for an error of the plan in a thread, which would end the thread alone."""
    if isinstance(error, EndOfScript):
        reason = error.error
    elif isinstance(error, ApplyFailed):
        reason = error
    else:
        return False

    class Ended(EndOfScript):
        def __init__(self) -> None:
            super().__init__(reason)

    def exit() -> None:
        print(f"error: {reason}", file=sys.stderr, flush=True)
        os._exit(reason.exit_code)

    end_main(Ended, _SECONDS, exit)
    return True


def check_script(plan: Plan, workload: Workload) -> None:
    """Raise `ApplyFailed` for a plan that was made for another script, and `UsageError` for a plan with a
    technique or an option that this torchtrim lacks."""
    path = workload.path if isinstance(workload, Script) else None
    script = "" if path is None else str(from_here(path))
    args = workload.args if isinstance(workload, Script) else ()
    again = f"Plan again: {plan_again(plan, script, args)}"
    for number, technique in enumerate(plan.techniques, 1):
        try:
            check_known(technique)
        except UsageError as error:
            place = f"entry {number} of [[techniques]] in the plan"
            raise UsageError(f"{place}: {error}\n{again}") from None
    if path is None or not plan.script_sha256:
        return
    if not path.is_file():
        raise UsageError(f"the script {path} does not exist.")
    if not is_unchanged(path, plan.script_sha256):
        same = PurePath(plan.script).name == path.name
        what = f"{path.name} has changed since the plan was made"
        raise ApplyFailed(
            f"{what if same else f'the plan was made for {plan.script}, not for {path.name}'}. If you know "
            f"that the plan still fits, delete `script_sha256` from it.\n{again}"
        )
