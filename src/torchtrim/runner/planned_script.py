"""Runs a script in this process with a plan applied to its models when they first run."""

from __future__ import annotations

import contextlib
import functools
import gc
import io
import os
import runpy
import sys
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from torch import nn

from torchtrim.capture.modules import Modules
from torchtrim.capture.optimizers import names_of
from torchtrim.capture.watch import Listener, Watcher
from torchtrim.errors import ApplyFailed, TorchtrimError, UsageError
from torchtrim.executor.apply import Applied, apply_plan, fingerprint_of, sha256_of
from torchtrim.executor.places import root_of
from torchtrim.executor.registry import check_known
from torchtrim.records.plan import Plan
from torchtrim.runner import worker
from torchtrim.runner.joining import Spawning
from torchtrim.runner.processes import LIFELINE, end_with_parent
from torchtrim.runner.script import Script
from torchtrim.runner.settings import Eagerly
from torchtrim.runner.stage_worker import PutsInStages, among_ranks
from torchtrim.runner.trials import Workload
from torchtrim.runner.worker import run_target

_EAGER = (
    "torchtrim: the script uses torch.compile; what it compiles runs eagerly, since the plan was made and "
    "certified so. Without --plan it runs compiled."
)
_OURS = (__file__, worker.__file__, runpy.__file__)


Check = Callable[[], None]


class EndOfScript(BaseException):
    """Raised in the script where it must end, with the error. No `except Exception` catches it."""

    def __init__(self, error: TorchtrimError) -> None:
        super().__init__(str(error))
        self.error = error


class Applier(Listener):
    """Applies the plan to each root that it names; when all are there, the script is let alone, unless it
    `stays`."""

    def __init__(self, plan: Plan, *, stays: bool = False) -> None:
        self.modules = Modules()
        self.watcher = Watcher(self)
        self._plan = plan
        self._stays = stays
        self._waits_for = {root_of(where) for one in plan.techniques for where in one.where}
        self._applied: list[Applied] = []

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
        if not self._waits_for and not self._stays:
            self.watcher.remove()

    def revert(self) -> None:
        """Take the plan back."""
        while self._applied:
            self._applied.pop().revert()

    def ended(self, error: BaseException | None) -> None:
        """The script has ended, so or with an error: tell what the plan never changed or has left undone.

        Raises `EndOfScript` for the latter where the script itself has not failed.
        """
        well = error is None or (isinstance(error, SystemExit) and not error.code)
        if self._waits_for and well:
            print(self._unapplied(), file=sys.stderr, flush=True)
        try:
            self.check_settled()
        except EndOfScript as end:
            if error is None or isinstance(error, SystemExit):
                raise
            print(f"torchtrim: {end.error}", file=sys.stderr, flush=True)

    def _unapplied(self) -> str:
        names = ", ".join(sorted(self._waits_for))
        said = f"torchtrim: the plan changed nothing of {names}, which the script's main thread never ran"
        if not self.watcher.elsewhere:
            return said
        return f"{said}. Another thread called modules: train in the main thread, which the plan is for"

    def check_settled(self) -> None:
        """Raise `EndOfScript` if the plan has updated parameters whose `step` has not come."""
        try:
            for applied in self._applied:
                applied.check_settled()
        except ApplyFailed as error:
            raise EndOfScript(error) from error


def run_planned(script: Script, plan: Plan | None, applier: Applier | None = None) -> None:
    """Run the script as `python` would, planned. Its exceptions and exits are its own.

    `applier`: who applies the plan, if it does more.
    """
    target = script.target if script.module else str(script.path)
    if lifeline := os.environ.pop(LIFELINE, ""):
        end_with_parent(int(lifeline))
        _join_ranks()
    if plan is not None and plan.pipeline is not None:
        _in_stages(script, target, plan)
        return
    if plan is None or not plan.techniques:
        try:
            _as_python(script, target)
        finally:
            flush_files()
        return
    applier = applier or Applier(plan)
    eagerly = Eagerly(_say_eager)
    eagerly.install()
    try:
        with applier.watcher, checked_saves(applier.check_settled):
            _as_python(script, target, applier.ended)
    except EndOfScript as end:
        raise end.error from None
    finally:
        eagerly.remove()
        flush_files()


def _join_ranks() -> None:
    """One of the ranks that `torchtrim run --processes 4` started runs what the script would spawn."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        Spawning(world).install()


_BUFFERED = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)


def flush_files() -> None:
    """Write out what the script's open files still hold.

    What keeps the script alive to the end of the process, such as a graph that runs its modules again, keeps
    its files open.
    """
    for one in gc.get_objects():
        if issubclass(type(one), _BUFFERED):
            with contextlib.suppress(OSError, ValueError):
                one.flush()


def _in_stages(script: Script, target: str, plan: Plan) -> None:
    """Run the script as one rank of the plan's pipeline."""
    assert plan.pipeline is not None
    puts = PutsInStages(plan, several=True, refused=lambda said: EndOfScript(ApplyFailed(said)))
    watcher = Watcher(puts)
    puts.watches = watcher.remove
    with among_ranks(plan.pipeline), contextlib.closing(puts):
        try:
            with watcher:
                _as_python(script, target, passed=(TorchtrimError,))
        except EndOfScript as end:
            raise end.error from None


def _say_eager() -> None:
    print(_EAGER, file=sys.stderr, flush=True)


def _as_python(
    script: Script,
    target: str,
    ended: Callable[[BaseException | None], None] = lambda _: None,
    passed: tuple[type[BaseException], ...] = (),
) -> None:
    """Run it. `passed`: exceptions that are not the script's own."""
    try:
        _run(script, target, ended)
    except passed:
        raise
    except Exception as error:
        _show(error)
        _end(1)
    except KeyboardInterrupt as error:
        _show(error)
        _end(130)


def _run(script: Script, target: str, ended: Callable[[BaseException | None], None]) -> None:
    try:
        run_target(target, script.module, script.args)
    except BaseException as error:
        ended(error)
        raise
    ended(None)


def _show(error: BaseException) -> None:
    """Show an exception as `python` would: by the script's own hook, without the frames that run it."""
    trace = error.__traceback__
    while trace is not None and _is_ours(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    if trace is not None:
        error = error.with_traceback(trace)
    sys.excepthook(type(error), error, error.__traceback__)


def _is_ours(path: str) -> bool:
    return path in _OURS or path.startswith("<frozen runpy")


def _end(code: int) -> NoReturn:
    sys.exit(code)


@contextlib.contextmanager
def checked_saves(check: Check) -> Iterator[None]:
    """Call `check` before each `state_dict` of a module and each `torch.save`; it raises to stop them.

    After a backward that updated parameters comes `step`. Where the program is thrown out in between (Ctrl-C,
    an exception) and saves its weights in a handler, they are not the original's.
    """
    with contextlib.ExitStack() as undo:
        for owner, name in ((nn.Module, "state_dict"), (torch, "save")):
            undo.callback(_checking(owner, name, check))
        yield


def _checking(owner: Any, name: str, check: Check) -> Callable[[], None]:
    """Put the check before a function; the result takes it off, unless another has wrapped it meanwhile."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def checked(*args: Any, **kwargs: Any) -> Any:
        check()
        return original(*args, **kwargs)

    def restore() -> None:
        if getattr(owner, name) is checked:
            setattr(owner, name, original)

    setattr(owner, name, checked)
    return restore


def check_script(plan: Plan, workload: Workload) -> None:
    """Raises `ApplyFailed` for a plan that was made for another script, and `UsageError` for one with a
    technique or an option that this torchtrim does not have."""
    for one in plan.techniques:
        check_known(one)
    path = workload.path if isinstance(workload, Script) else None
    if path is None or not plan.script_sha256:
        return
    if not path.is_file():
        raise UsageError(f"there is no script {path}.")
    if sha256_of(path) != plan.script_sha256:
        raise ApplyFailed(
            f"the plan was made for {plan.script}, and {path.name} is another script or has changed "
            "since. Plan again; or, if you know that it still fits, delete `script_sha256` from the plan."
        )
