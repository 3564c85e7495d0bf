"""What `torchtrim run` says on stderr: what a plan changes, and in the end how it held."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from torch import nn

from torchtrim.core.isolation import isolated
from torchtrim.core.units import counted, format_apart, format_bytes, format_seconds
from torchtrim.executor.registry import assumed_by, technique
from torchtrim.records.commands import command, plan_again
from torchtrim.records.plan import Plan, Technique, digest_of_techniques
from torchtrim.records.profile import is_emulated
from torchtrim.runner.run_watch import REPORT, Notice, RunWatch


class RunReport:
    """Report of a planned run, in a few lines at its start and its end; only rank 0 prints.

    `path` names the plan. `verbose`: also name each place and each assumption.
    """

    def __init__(
        self, plan: Plan, path: Path, *, args: Sequence[str] | None = None, verbose: bool = False
    ) -> None:
        self.watch = RunWatch(plan, self._say)
        self._plan = plan
        self._path = path
        self._args = args
        self._verbose = verbose
        self._speaks = os.environ.get("RANK", "0") == "0"
        self._pid = os.getpid()
        self._is_applied = False
        self._reverted = 0

    def root_appears(self, name: str, root: nn.Module) -> None:
        """Watch a root."""
        if self._speaks:
            with isolated("renderer", REPORT):
                self.watch.watch(name, root)

    def applied(self, optimizers: int) -> None:
        """Say that the whole plan is applied, in a script with this many optimizers."""
        if self._is_applied or not self._speaks:
            return
        self._is_applied = True
        self.watch.begin(optimizers)
        self.start()

    def start(self) -> None:
        """Say what the plan changes."""
        for line in start_lines(self._plan, self._path, verbose=self._verbose):
            self._say(line)
        certified = self._plan.certified
        if certified is not None and None not in (self._args, certified.args):
            planned = shlex.join(certified.args or ())
            if planned != shlex.join(self._args or ()):
                self._say(
                    f"certified with {f'the arguments {planned}' if planned else 'no arguments'}, not these: "
                    "peak, time and results are shown for those alone"
                )

    def reverted(self) -> None:
        """Note that the plan was reverted."""
        self._reverted = self.watch.steps + 1

    def end(self, error: BaseException | None) -> None:
        """Say how the run went, after its last line. `error`: the exception that ended it."""
        with isolated("renderer", REPORT):
            self._end(error)

    def _end(self, error: BaseException | None) -> None:
        self.watch.end()
        if self._is_applied:
            ended = end_lines(self._plan, self._path, self.watch, error, self._reverted)
            assumed = assumption_lines(self._plan, self.watch, verbose=self._verbose)
            for line in (*ended, *assumed):
                self._say(line)

    def _say(self, line: str) -> None:
        if self._speaks and os.getpid() == self._pid:
            with suppress(OSError, ValueError):
                print(f"torchtrim: {line}", file=sys.stderr, flush=True)


def start_lines(plan: Plan, path: Path, *, verbose: bool) -> Iterator[str]:
    """Yield what a plan changes, its budget and its prediction."""
    yield f"applied {path}: {', '.join(_parts(plan))}"
    for one in plan.techniques if verbose else ():
        does = getattr(technique(one.name), "does", "")
        yield f"  {one.name}{f' ({does})' if does else ''}: {', '.join(one.where)}"
    budget = f"budget {format_bytes(plan.budget_bytes)}{_kind(plan)}"
    yield f"{budget}, predicted peak {format_bytes(plan.predicted.peak_bytes)}; {_proof(plan, path)}"


def _parts(plan: Plan) -> list[str]:
    if plan.pipeline is not None:
        return [f"a pipeline of {counted(plan.pipeline.processes, 'process', 'processes')}"]
    if plan.compiled:
        graphs = counted(len(plan.compiled), "compiled graph")
        return [f"less is saved for backward in {graphs}"]
    if not plan.techniques:
        return ["it changes nothing, since the original fits"]
    return [f"{one.name} {_at(one, plan)}" for one in plan.techniques]


def _kind(plan: Plan) -> str:
    return "" if plan.memory_kind == "allocated" else f" of {plan.memory_kind} memory"


def _at(one: Technique, plan: Plan) -> str:
    if len(one.where) == 1 and ":" not in one.where[0]:
        return f"at {one.where[0]}"
    modules = all(":" not in where and "[" not in where for where in one.where)
    optimizers = modules and all(
        "." not in where and where not in plan.fingerprint for where in one.where
    )
    noun = "optimizer" if optimizers else "module" if modules else "place"
    return f"at {counted(len(one.where), noun)}"


_VERDICTS = {
    "BITWISE": "identical to the original, bit for bit",
    "ROUNDING": "equal to the original up to rounding",
    "AS ASKED": "the requested change of the function, and all else equal",
}


def _proof(plan: Plan, path: Path) -> str:
    """Return what a certificate says of the plan."""
    proof = plan.certified
    if proof is None and not plan.techniques and not plan.compiled:
        return "nothing to certify" if plan.pipeline is None else "not certified in this file"
    if proof is None:
        verify = command("verify", "--plan", str(path), script=plan.script)
        return f"not certified: {verify} compares it with the original"
    if proof.techniques != digest_of_techniques(plan.techniques, plan.compiled):
        return "edited since it was certified"
    what = _VERDICTS.get(proof.verdict, proof.verdict)
    return f"certified: {what}, in {counted(proof.steps, 'step')}"


def end_lines(
    plan: Plan, path: Path, watch: RunWatch, error: BaseException | None, reverted: int
) -> Iterator[str]:
    """Yield how many steps ran, their peak and their time, beside the budget and the prediction."""
    noun = "call" if plan.is_of_calls else "step"
    ended = _ended(error, f"{noun} {watch.steps + 1}")
    if watch.is_by_hand:
        yield f"ran with {path}: no torch.optim optimizer stepped, so steps and their figures are not known"
        return
    peak = f": peak {_peak(plan, watch)}" if watch.steps else ""
    yield f"{counted(watch.steps, noun)} with {path}{ended}{peak}"
    if watch.steps:
        yield _time(plan, watch, noun)
    if reverted:
        yield f"the plan was reverted before {noun} {reverted}: the figures are of the whole run"


def _ended(error: BaseException | None, where: str) -> str:
    if error is None or (isinstance(error, SystemExit) and not error.code):
        return ""
    code = f"({error.code!r:.20})" if isinstance(error, SystemExit) else ""
    return f", until {type(error).__name__}{code} in {where}"


def _peak(plan: Plan, watch: RunWatch) -> str:
    peak, how = watch.peak.bytes, watch.peak.how
    if peak is None:
        return how
    used, asked = format_apart(peak, plan.budget_bytes)
    measured = f"{used}{f' ({how})' if how else ''}"
    budget = f"the budget of {asked}{_kind(plan)}"
    if _on_gpu(plan.predicted.device) != _on_gpu(watch.device) and plan.predicted.device:
        again = plan_again(plan, device=watch.device)
        there = _named(plan.predicted.device)
        return f"{measured} on {watch.device}; {budget} is for {there}; for this device: {again}"
    over = peak - plan.budget_bytes
    fits = f"{format_bytes(over)} OVER" if over > 0 else "within"
    return f"{measured}, {fits} {budget} (predicted {format_bytes(plan.predicted.peak_bytes)})"


def _named(device: str) -> str:
    """Return `"an emulated A100"` for `"emulated a100"`."""
    kind, _, model = device.partition(" ")
    return f"an emulated {model.upper() or 'GPU'}" if kind == "emulated" else device


def _on_gpu(device: str) -> bool:
    return device.startswith("cuda") or is_emulated(device)


def _time(plan: Plan, watch: RunWatch, noun: str) -> str:
    """Return the measured time beside the predicted one, with the device of each if they differ."""
    here, there = watch.device or "this machine", plan.predicted.device
    if watch.seconds is None:
        return f"time of a {noun} on {here}: not measured, too few ran"
    took = f"{format_seconds(watch.seconds)} a {noun} on {here} (median)"
    if is_emulated(there):
        return f"{took}; planned on {_named(there)}, which predicts no time"
    other = f" on {there}" if there and _on_gpu(there) != _on_gpu(here) else ""
    return f"{took}, predicted {format_seconds(plan.predicted.step_seconds)}{other}"


def assumption_lines(plan: Plan, watch: RunWatch, *, verbose: bool) -> Iterator[str]:
    """Yield the assumptions that held in every step, and those that did not, with their first step."""
    held, failed = _held(plan, watch), _failed(watch)
    if verbose:
        yield from (f"held: {one}" for one in held)
        yield from (f"did not hold: {one}" for one in failed)
        return
    if held:
        yield f"held in every step: {'; '.join(held)}"
    if failed:
        more = f"; {len(failed) - _MOST} more: --verbose" if len(failed) > _MOST else ""
        yield f"did not hold: {'; '.join(failed[:_MOST])}{more}"


_MOST = 3  # lines of the terminal


def _held(plan: Plan, watch: RunWatch) -> list[str]:
    held = [f"{', '.join(plan.fingerprint)} as planned"] if plan.fingerprint else []
    if watch.inputs.compares and not watch.inputs.others:
        held.append("inputs as certified")
    places = {one.where for one in watch.notices}
    for one in plan.techniques:
        if places.isdisjoint(one.where) and places.isdisjoint(_modules_of(one)):
            held += assumed_by(one)
    return list(dict.fromkeys(held))


def _modules_of(one: Technique) -> list[str]:
    return [where.partition(":")[0] for where in one.where]


def _failed(watch: RunWatch) -> list[str]:
    """Return what did not hold; each notice was printed in full when it happened."""
    inputs = watch.inputs
    count = counted(
        max(watch.steps, inputs.other_steps), "step"
    )  # the last may have been cut short
    said = [f"{inputs.others[0]} (in {inputs.other_steps} of {count})"] if inputs.others else []
    places: dict[str, list[Notice]] = {}
    for notice in watch.notices:
        places.setdefault(_CLAUSE.split(notice.said)[0].strip(), []).append(notice)
    for what, them in places.items():
        more = f" and {len(them) - 1} more" if len(them) > 1 else ""
        said.append(f"`{them[0].where}`{more}, from step {them[0].step}: {what}")
    return [*said, *inputs.others[1:]]


_CLAUSE = re.compile(r"[.,:(]")
