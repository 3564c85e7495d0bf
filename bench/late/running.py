"""Plans of one technique for the loop as it is, and what becomes of a changed loop under them."""

from __future__ import annotations

import contextlib
import functools
import gc
import io
import json
import math
import os
import random
import re
import runpy
import signal
import tempfile
import unittest.mock
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

import torchtrim
from bench.late.changes import SHAPES, Case
from torchtrim.certify.certify import NOISE_FACTOR
from torchtrim.costs.devices import device_named
from torchtrim.emulator import emulate
from torchtrim.errors import TorchtrimError
from torchtrim.executor.apply import apply_plan
from torchtrim.executor.registry import Option, Replaces, names, settled, technique, unseen_by
from torchtrim.planner.pins import overlap
from torchtrim.records.plan import Plan, Prediction, Technique
from torchtrim.runner import planned_script
from torchtrim.runner.script import Script
from torchtrim.step.edits import Edit
from torchtrim.step.from_profile import on_device, step_of
from torchtrim.step.step import Step

SECONDS = 60
_SHRINKS_BY = 1e4  # well below 2**29, by which rounding shrinks from float32 to float64
_IN_FILES = ("offload_activations", "offload_optimizer")
_ON_DEVICES = (*_IN_FILES, "plain_optimizer")
_SCALED = {"from_batch": 8, "to_batch": 16, "rule": "sqrt", "warmup": 0}
_MOST_PLACES = 12  # Arbitrary; enough for every block of the loop.


class Ran(NamedTuple):
    """How a run ended: the lines it printed, its exit code, what stood on stderr."""

    lines: list[str]
    code: int
    said: str

    @property
    def left(self) -> dict[str, Any]:
        """What it printed last, of a run that came to its end."""
        found = json.loads(self.lines[-1]) if self.lines else {}
        return found if isinstance(found, dict) else {}

    @property
    def numbers(self) -> list[float]:
        """What it said in its steps, and the sums of what it left."""
        said = (json.loads(line) for line in self.lines)
        return [n for one in said for n in (one if isinstance(one, list) else one["sums"])]


class Planner:
    """Plans for a model and an optimizer, of one technique each. `seed` orders its places."""

    def __init__(self, shape: str, optimizer: str, seed: int = 0) -> None:
        self._shape, self._optimizer = shape, optimizer
        self._rng = random.Random(seed)

    def plans(self) -> dict[str, Plan]:
        """The plans, by technique: of those that have a place in this step."""
        found = {name: self.plan(name) for name in names()}
        return {name: plan for name, plan in found.items() if plan is not None}

    def plan(self, name: str) -> Plan | None:
        """The plan of one technique, or None."""
        one = self._technique(name)
        return None if one is None else _plan(one)

    def _technique(self, name: str) -> Technique | None:
        if name == "scale_lr":
            where = (self._optimizer,)
            return Technique(name=name, where=where, options=_SCALED, equivalence="SEMANTIC")
        if name == "recompute_function" and "function" in SHAPES[self._shape]:
            # A recording names functions of files that can be imported, unlike the loop.
            return Technique(name=name, where=(f"Net:__main__.{SHAPES[self._shape]['function']}",))
        for cuda in (False, True)[: 2 if name in _ON_DEVICES else 1]:
            step = _recorded(self._shape, self._optimizer, cuda=cuda)
            if chosen := self._chosen(name, step, in_files=name in _IN_FILES and not cuda):
                unit, first = technique(name), chosen[0]
                one = Technique(
                    name=name,
                    where=tuple(dict.fromkeys(option.where for option in chosen)),
                    options=dict(first.settings),
                    equivalence=first.equivalence or unit.equivalence,
                )
                return settled(step, one)
        return None

    def _chosen(self, name: str, step: Step, *, in_files: bool) -> list[Option]:
        unit: Any = technique(name)
        asked = unit.to_files if in_files else unit.options
        options = list(asked(step))
        self._rng.shuffle(options)
        taken: list[tuple[Option, Edit | None]] = []
        for option in options:
            edit = None if isinstance(unit, Replaces) else unit.edits(step, option)
            is_place = edit is not None or isinstance(unit, Replaces)
            if not is_place or (taken and option.settings != taken[0][0].settings):
                continue
            if not any(_meet(option, edit, *other) for other in taken):
                taken.append((option, edit))
        return [option for option, _ in taken[:_MOST_PLACES]]


def _meet(one: Option, edit: Edit | None, other: Option, others: Edit | None) -> bool:
    if one.where == other.where:
        return True
    if edit is None or others is None:
        return overlap(one.spans, other.spans)
    return overlap(edit.claims, others.claims)


@functools.cache
def _recorded(shape: str, optimizer: str, *, cuda: bool) -> Step:
    with tempfile.TemporaryDirectory() as folder, emulate() if cuda else contextlib.nullcontext():
        script = Path(folder) / "begins.py"
        script.write_text(Case(shape=shape, optimizer=optimizer).beginning())
        return _read(runpy.run_path(str(script)), cuda=cuda)


def _read(made: Mapping[str, Any], *, cuda: bool) -> Step:
    net, opt, loss_of, (x, y) = made["net"], made["opt"], made["loss_of"], made["batch_of"](0)
    if cuda:
        net.cuda()
        x, y = x.cuda(), y.cuda()
    step = torchtrim.TrainStep(
        net, lambda model, batch: loss_of(model(batch[0]), batch[1]), opt, (x, y)
    )
    step.step(0)
    profile = torchtrim.record(step)
    torch.set_default_dtype(torch.float32)
    return on_device(step_of(profile), device_named("a100")) if cuda else step_of(profile)


def _plan(one: Technique) -> Plan:
    predicted = Prediction(peak_bytes=1, step_seconds=1.0, device="cpu")
    return Plan(
        torchtrim="",
        script="",
        fingerprint={},
        budget_bytes=1,
        techniques=(one,),
        predicted=predicted,
    )


def ran(text: str, plan: Plan | None = None, *, by_hand: bool = False) -> Ran:
    """Run a script in this process, or in a fork of it if it changes what other scripts use."""
    with tempfile.TemporaryDirectory() as folder:
        script, *files = [Path(folder) / name for name in ("script.py", "out", "err")]
        script.write_text(text)
        if _OF_ALL.search(text) is None:
            return _in_process(script, plan, by_hand)
        if (child := os.fork()) == 0:
            ended = _in_process(script, plan, by_hand)
            for file, said in zip(files, ("\n".join(ended.lines), ended.said), strict=True):
                file.write_text(said)
            os._exit(ended.code)
        _, status = os.waitpid(child, 0)
        out, err = (file.read_text() if file.exists() else "" for file in files)
    return Ran(_told(out), os.waitstatus_to_exitcode(status), err)


_OF_ALL = re.compile(
    r"register_module|register_optimizer|F\.relu =|os\.environ|set_default_device|nn\.\w+\.forward ="
)
"""Changes of torch itself or of the process."""


def _told(out: str) -> list[str]:
    return [line for line in out.splitlines() if line.startswith(("[", "{"))]


def _in_process(script: Path, plan: Plan | None, by_hand: bool) -> Ran:
    out, err, code = io.StringIO(), io.StringIO(), 1
    apply = functools.partial(apply_plan, by_hand=by_hand)
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        contextlib.chdir(script.parent),
        unittest.mock.patch.object(planned_script, "apply_plan", apply),
        # It looks at every object of the process, which takes longer than the script.
        unittest.mock.patch.object(planned_script, "flush_files"),
    ):
        try:
            signal.alarm(SECONDS)
            planned_script.run_planned(Script(str(script)), plan)
            code = 0
        except SystemExit as end:
            code = int(end.code or 0) if not isinstance(end.code, str) else 1
        except TorchtrimError as error:
            print(f"error: {error}", file=err)
        finally:
            signal.alarm(0)
    return Ran(_told(out.getvalue()), code, err.getvalue())


class Judge:
    """Judges planned runs of one script against its plain runs, which it makes when needed."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self.plain = functools.cache(self._plain)

    def _plain(self, double: bool = True, nudged: bool = False) -> Ran:
        return ran(self._case.text(double=double, nudged=nudged))

    def verdict(self, plan: Plan) -> str:
        """`equal`, `rounding`, `stopped`, `assumed`, `fails too`, or a fault, in capitals."""
        if plan.techniques[0].equivalence == "SEMANTIC":
            return self._as_asked(plan)
        double = self._case.is_double
        return self._against(plan, self.plain(double), double=double)

    def _as_asked(self, plan: Plan) -> str:
        """Compare with the change made by hand, in float32: half precision leaves float64 alone."""
        by_hand = ran(self._case.text(double=False), plan, by_hand=True)
        if by_hand.code and not self.plain(double=False).code:
            return "fails by hand"
        return self._against(plan, by_hand, double=False)

    def _against(self, plan: Plan, plain: Ran, *, double: bool) -> str:
        planned = ran(self._case.text(double=double), plan)
        if plain.code:
            return "fails too" if planned.code else "SILENT: only the original fails"
        if planned.code:
            return self._stopped(plain, planned, plan)
        if plain.lines == planned.lines:
            return "equal"
        if plan.techniques[0].equivalence == "ROUNDING" and self._rounds(plan, plain, planned):
            return "rounding"
        if any(
            what in said for what in self._case.unseen for said in unseen_by(plan.techniques[0])
        ):
            return "assumed"
        exact = plain.left.get("exact") != planned.left.get("exact")
        what = " what is exact differs," if exact else ""
        return f"SILENT:{what} {_first_difference(plain.lines, planned.lines)}"

    def _rounds(self, plan: Plan, plain: Ran, planned: Ran) -> bool:
        """Decide as a certificate does: by one rounding of the original's, or from float32 to float64."""
        if plain.left["exact"] != planned.left["exact"]:
            return False
        apart = _apart(plain, planned)
        double = self._case.is_double
        if apart <= NOISE_FACTOR * _apart(plain, self.plain(double, nudged=True)):
            return True
        if not double:
            return False
        coarse = ran(self._case.text(double=False), plan)
        return apart * _SHRINKS_BY <= _apart(self.plain(double=False), coarse)

    def _stopped(self, plain: Ran, planned: Ran, plan: Plan) -> str:
        said = planned.said.strip().splitlines()[-1:] or [""]
        found = re.search(r"^(error: |torchtrim\.errors\.)", planned.said, re.MULTILINE)
        if found is None:
            return f"SILENT: died with {planned.code}: {said[0][-300:]}"
        message = planned.said[found.start() :]
        if not self._case.causes or not re.search(self._case.causes, message):
            return f"WRONG CAUSE: {message.strip()[:400]}"
        if plain.lines[: len(planned.lines)] != planned.lines and not self._nears(
            plain, planned, plan
        ):
            return f"LATE STOP: {_first_difference(plain.lines, planned.lines)}"
        return "stopped"

    def _nears(self, plain: Ran, planned: Ran, plan: Plan) -> bool:
        if plan.techniques[0].equivalence != "ROUNDING":
            return False
        first = plain._replace(lines=plain.lines[: len(planned.lines)])
        return _apart(first, planned) <= 1 / _SHRINKS_BY


def _apart(one: Ran, other: Ran) -> float:
    """The largest relative difference of two runs' numbers; infinite if there are more in one."""
    if len(one.numbers) != len(other.numbers):
        return math.inf
    pairs = zip(one.numbers, other.numbers, strict=True)
    return max((_relative(a, b) for a, b in pairs), default=0.0)


def _relative(one: float, other: float) -> float:
    if one == other or (math.isnan(one) and math.isnan(other)):
        return 0.0
    found = abs(one - other) / max(1.0, abs(one))
    return math.inf if math.isnan(found) else found


def _first_difference(one: Sequence[str], other: Sequence[str]) -> str:
    pairs = zip(one, other, strict=False)
    line, a, b = next(((n, a, b) for n, (a, b) in enumerate(pairs) if a != b), (-1, "", ""))
    at = next((n for n, (c, d) in enumerate(zip(a, b, strict=False)) if c != d), 0)
    return f"line {line}: {a[max(0, at - 30) : at + 40]} | {b[max(0, at - 30) : at + 40]}"


def judged(case: Case, plans: Mapping[str, Plan]) -> dict[str, str]:
    """Return the verdict of each technique on a case, found in a fork of this process."""
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "found.json"
        gc.freeze()
        if (child := os.fork()) == 0:
            judge = Judge(case)
            found.write_text(
                json.dumps({name: judge.verdict(plan) for name, plan in plans.items()})
            )
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if not found.exists():
            return dict.fromkeys(plans, f"SILENT: a run ended its process: {status}")
        verdicts: dict[str, str] = json.loads(found.read_text())
    return verdicts
