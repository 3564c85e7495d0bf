"""Runs a script in this process with a plan applied to its models when they first run."""

from __future__ import annotations

import os
import runpy
import sys
from typing import NoReturn

import torch
from torch import nn

from torchtrim.errors import ApplyFailed
from torchtrim.observe.modules import Modules
from torchtrim.observe.optimizers import names_of
from torchtrim.observe.watch import Listener, Watcher
from torchtrim.records.plan import Plan
from torchtrim.run import worker
from torchtrim.run.eagerly import Eagerly
from torchtrim.run.processes import LIFELINE, end_with_parent
from torchtrim.run.script import Script
from torchtrim.run.worker import run_target
from torchtrim.techniques.apply import apply_plan
from torchtrim.techniques.fingerprint import fingerprint_of
from torchtrim.techniques.places import root_of

_EAGER = (
    "torchtrim: the script uses torch.compile; what it compiles runs eagerly, since the plan was made and "
    "certified so. Without --plan it runs compiled."
)
_OURS = (__file__, worker.__file__, runpy.__file__)


class Refused(BaseException):
    """Raised in the script when the plan was made for another model."""


class _Applier(Listener):
    """Applies the plan to each root that it names; when all are there, the script is let alone."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._waits_for = {root_of(where) for one in plan.techniques for where in one.where}
        self._modules = Modules()
        self.watcher = Watcher(self)

    def root_appears(self, root: nn.Module) -> None:
        name = self._modules.add_root(root)
        expected = self._plan.fingerprint.get(name)
        if expected not in (None, fingerprint_of(root)):
            raise Refused(f"the plan was made for another {name}; plan again for this one.")
        self._apply(name, root)

    def optimizer_appears(self, optimizer: torch.optim.Optimizer) -> None:
        known = self.watcher.optimizers
        self._apply(names_of(known)[known.index(optimizer)], optimizer)

    def _apply(self, name: str, root: nn.Module | torch.optim.Optimizer) -> None:
        try:
            apply_plan(self._plan, {name: root})
        except ApplyFailed as error:
            raise Refused(str(error)) from error
        self._waits_for.discard(name)
        if not self._waits_for:
            self.watcher.remove()


def run_planned(script: Script, plan: Plan | None) -> None:
    """Run the script as `python` would, planned. Its exceptions and exits are its own."""
    target = script.target if script.module else str(script.path)
    if lifeline := os.environ.pop(LIFELINE, ""):
        end_with_parent(int(lifeline))
    if plan is None or not plan.techniques:
        _as_python(script, target)
        return
    applier = _Applier(plan)
    eagerly = Eagerly(_say_eager)
    eagerly.install()
    try:
        with applier.watcher:
            _as_python(script, target)
    except Refused as error:
        raise ApplyFailed(str(error)) from None
    finally:
        eagerly.remove()


def _say_eager() -> None:
    print(_EAGER, file=sys.stderr, flush=True)


def _as_python(script: Script, target: str) -> None:
    try:
        run_target(target, script.module, script.args)
    except Exception as error:
        _show(error)
        _end(1)
    except KeyboardInterrupt as error:
        _show(error)
        _end(130)


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
