"""Measures and evidence of a session's steps: seconds, peaks, operators and digests."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace
from torch import nn

from torchtrim.capture.allocator import NOTHING, Allocator, Watched, allocator_for, own
from torchtrim.capture.build import Setting
from torchtrim.capture.modules import Modules
from torchtrim.capture.recording import Recording, counted_device, tensors_in
from torchtrim.capture.watch import Listener
from torchtrim.core.clock import now
from torchtrim.dispatch.places import Places
from torchtrim.dispatch.storages import reachable_bytes, storage_bytes
from torchtrim.evidence.evidence import (
    Evidence,
    digest_of,
    has_bits,
    keep_value,
    kind_of,
    sketch_of,
)
from torchtrim.evidence.script_state import ScriptState
from torchtrim.executor.apply import shards
from torchtrim.records.profile import Profile
from torchtrim.records.trial import Trial, TrialStep


class StepClock:
    """Clock of a step's seconds, without torchtrim's own work."""

    def __init__(self) -> None:
        self._began = self._own = 0.0

    def begin(self) -> None:
        """Begin a step."""
        self._own = 0.0
        self._began = now()

    @property
    def seconds(self) -> float:
        """The seconds until now."""
        return max(now() - self._began - self._own, 0.0)

    def aside(self, function: Callable[..., None], *args: Any) -> None:
        """Call a function unrecorded, and outside the step's time."""
        begin = now()
        with torch.utils._python_dispatch._disable_current_modes():
            function(*args)
        self._own += now() - begin


_MOST_WARMUP = 3  # Arbitrary: what still grows then grows with each step.
_GROWTH = 0.001  # Of the peak. Arbitrary; a list of losses grows by less.
_PATIENCE = 64
"""Calls without a higher peak. Arbitrary: several times the batches that a loop keeps for later."""
_MOST_CALLS = 1024
"""Arbitrary: a long answer of a language model; each call costs about as long as it has operators."""


class HighestCall:
    """A search for the call with the highest peak, of a script that only runs its models."""

    def __init__(self) -> None:
        self._calls = 0
        self._peaks = [0]
        self._at = 0

    def takes(self, peak: int) -> bool:
        """Return True if the next call's peak is the highest so far."""
        self._calls += 1
        if peak <= self._peaks[-1]:
            return False
        self._peaks.append(peak)
        self._at = self._calls
        return True

    @property
    def over(self) -> bool:
        """True if a higher peak is no longer looked for."""
        return self._calls >= min(self._at + _PATIENCE, _MOST_CALLS)

    def note(self) -> str:
        """Return what was searched: the first calls, or all of the script."""
        calls = "1 call" if self._calls == 1 else f"{self._calls} calls"
        said = f"a step is a call of its model: of {calls}, number {self._at} has the highest peak"
        if not self.over:
            return said
        if self._at < self._calls:
            return (
                f"{said}, and the script was stopped then: longer inputs after that are not counted"
            )
        rise = self._peaks[-1] - self._peaks[-2]
        return (
            f"{said}, and the script was stopped then, with the peak still rising by {rise} bytes a call: "
            "estimate a shorter run, or free what each call leaves"
        )


class StepMeasure:
    """Measure of a trial's steps, one after another: a recording, or the peak alone.

    `ours` returns torchtrim's own storages, which count only in the memory of the process.
    """

    def __init__(
        self,
        trial: Trial,
        modules: Modules,
        places: Places,
        setting: Setting,
        ours: Callable[[], Sequence[Any]],
    ) -> None:
        self.clock = StepClock()
        self.recording: Recording | None = None
        self.fallback: Profile | None = None
        self._trial = trial
        self._modules = modules
        self._places = places
        self._setting = setting
        self._ours = ours
        self._ours_bytes = self._alive = 0
        self._watching: Allocator = allocator_for(setting.device)
        self._watched: Watched | None = None
        self._seconds = 0.0
        self._idled = False
        self._between: Allocator = Allocator()
        self._digests: list[str] = []
        self._lines: list[tuple[str, int, bool]] = []
        self.highest = HighestCall() if trial.request.searches else None

    def settle(self, setting: Setting) -> None:
        """Measure on a device that was unknown until now."""
        self._setting = setting
        self._watching = allocator_for(setting.device)

    def _watch_between(self) -> None:
        """Watch the allocator between steps: it reports frees only of blocks that it was seen to allocate."""
        self._between.stop()
        if self._trial.request.measured:
            self._between = allocator_for(self._setting.device)
            self._between.start()

    def begin(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Begin measuring the next step."""
        number, request = len(self._trial.steps), self._trial.request
        if self._idled:
            self._between.stop()
            self._watching = allocator_for(self._setting.device)
            self._idled, self._alive = False, reachable_bytes()
        ours = self._ours()
        self._ours_bytes = storage_bytes(ours, counted_device(self._setting.device))
        # A script may end before its step to record, but not if it ran unplanned before.
        early = 0 if self._setting.script and request.plan is None else request.warmup
        scans = request.measured and early <= number <= request.warmup and not request.compiles
        records = request.searches or scans
        if records or number == request.traced:
            watching = self._watching if request.measured else None
            self.recording = Recording(self._modules, self._places, self._setting, watching)
            scan = request.searches or (request.measured and number == request.warmup)
            if number == request.traced:
                self._digests, self._lines = [], []
                self.recording.recorder.look = self._look
            self.recording.begin(optimizers, scan=scan, ours=ours)
        elif request.measured:
            if not number:
                self._alive = reachable_bytes()
            self._watching.start()
        self._watched = None
        self.clock.begin()

    def idle(self) -> None:
        """Stop measuring: everything until the next step is evaluation."""
        if self._watched is None:
            self.stop()
            self._idled = True
        if self._idled:
            self._watch_between()

    def stop(self) -> None:
        """Stop measuring, if not stopped yet; `close` notes the step until here."""
        if self._watched is not None:
            return
        self._seconds = self.clock.seconds
        if self.recording is not None:
            self.recording.pause()
            self._watched = NOTHING
        else:
            self._watched = self._watching.stop() if self._trial.request.measured else NOTHING

    def close(self, step: TrialStep, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """End the step's recording or watch, and note its time and its peak."""
        step.seconds = self._seconds
        recording, self.recording = self.recording, None
        if recording is None:
            watched = self._watched or NOTHING
            before = self._alive if watched.before is None else watched.before
            known = watched.peak and before
            step.peak_bytes = before - self._ours_bytes + watched.peak if known else 0
            step.reserved_bytes, step.left_bytes = watched.reserved, watched.end
            start = before - self._ours_bytes
            step.phases = {name: start + high for name, high in watched.phases.items()}
            self._alive += watched.end if known else 0
            return
        trial, number = self._trial, len(self._trial.steps)
        if number == trial.request.traced:
            trial.profile = recording.end(optimizers)
            trial.digests, trial.lines = tuple(self._digests), tuple(self._lines)
            return
        profile = recording.end(optimizers)
        if self.highest is not None and not self.highest.takes(profile.peak_bytes):
            return
        if number < trial.request.warmup or self._goes_on(profile):
            self.fallback = profile
            return
        trial.profile, trial.recorded = profile, number
        self._alive = recording.alive_bytes + self._ours_bytes
        step.peak_bytes = profile.peak_bytes
        step.reserved_bytes = profile.reserved_bytes

    def _goes_on(self, profile: Profile) -> bool:
        """Have an estimate run a step more if this one leaves more than it found, as a queue that fills."""
        request, before = self._trial.request, self.fallback
        if not request.dry or before is None or request.warmup >= _MOST_WARMUP:
            return False
        if _left_bytes(profile) - _left_bytes(before) <= _GROWTH * profile.peak_bytes:
            return False
        self._trial.request = replace(request, warmup=request.warmup + 1)
        return True

    def abandon(self) -> None:
        """Stop measuring without a result."""
        recording, self.recording = self.recording, None
        if recording is not None:
            recording.abandon()
        self._watching.stop()
        self._between.stop()

    def _look(self, operator: Any, given: Any) -> None:
        """Keep the user's line and a digest of an operator's outputs, the shape alone of empty tensors.

        In float64, the digest is a sketch, and shows the size of a difference.
        """
        self._lines.append(self._places.users_line(sys._getframe(2)))
        digest = sketch_of if self._trial.request.double else digest_of
        digest = kind_of if "empty" in str(operator) else digest
        with torch._C._DisableTorchDispatch(), torch.no_grad(), own():
            digests = [digest(tensor) for tensor in tensors_in(given) if has_bits(tensor)]
        self._digests.append(",".join(digests))


def _left_bytes(profile: Profile) -> int:
    ends = len(profile.operators)
    return sum(one.counted for one in profile.storages if one.death >= ends)


class ComparedSteps(Listener):
    """Collector of each step's evidence outside the step's time; the recorded step has none.

    `trains`: steps train; `folder`: folder for the values that the request keeps.
    """

    def __init__(
        self,
        trial: Trial,
        modules: Modules,
        clock: StepClock,
        folder: Path | None,
        script: ScriptState | None,
        *,
        trains: bool,
    ) -> None:
        self._trial = trial
        self._clock = clock
        self._folder = folder
        keep = self._keep if trial.request.keep else None
        looks = trial.request.traced >= 0
        digests = trial.request.digests
        self.evidence = Evidence(
            modules, keep, digests=digests, graded=trains, looks=looks, script=script
        )
        self.evidence.gathers = shards(trial.request.plan)

    @property
    def listens(self) -> bool:
        trial = self._trial
        return not trial.request.dry and len(trial.steps) < trial.request.total

    @property
    def _gathers(self) -> bool:
        return len(self._trial.steps) != self._trial.request.warmup

    def begins(self, name: str, root: nn.Module) -> None:
        if self.listens:
            self._clock.aside(self.evidence.begins, name, root)

    def module_starts(self, module: nn.Module, args: Any, kwargs: Any, depth: int) -> None:
        if self._gathers:
            self.evidence.is_called(module, depth)
        if depth == 0:
            self._clock.aside(self.evidence.module_starts, module, args, kwargs, depth)

    def module_ends(self, module: nn.Module, output: Any, depth: int) -> None:
        if depth == 0 and self._gathers:
            self._clock.aside(self.evidence.module_ends, module, output, depth)

    def backward_starts(self, tensors: tuple[torch.Tensor, ...]) -> None:
        if self._gathers:
            self._clock.aside(self.evidence.backward_starts, tensors)

    def optimizer_ends(self, optimizer: torch.optim.Optimizer) -> None:
        if self._gathers:
            self._clock.aside(self.evidence.optimizer_ends, optimizer)

    def update_ends(self, optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> None:
        if self._gathers:
            self._clock.aside(self.evidence.update_ends, optimizer, parameter)

    def _keep(self, name: str, tensor: torch.Tensor) -> None:
        label = f"{len(self._trial.steps)}/{name}"
        keep = self._trial.request.keep
        if self._folder is not None and label in keep:
            keep_value(self._folder / f"kept-{keep.index(label)}", tensor)
