"""Leads one run through its steps: warm-up, the recorded step, then steps that are timed and compared."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar, cast

import torch
from msgspec.structs import replace
from torch import nn

from torchtrim.capture.allocator import rss_bytes
from torchtrim.capture.build import Setting
from torchtrim.capture.growth.stream_frames import StreamFrames
from torchtrim.capture.modules import Modules
from torchtrim.capture.optimizers import names_of
from torchtrim.capture.recording import Recording
from torchtrim.capture.replicas import Replicas
from torchtrim.capture.times import Times, with_times
from torchtrim.capture.watch import Listener, Watcher
from torchtrim.dispatch.places import Places
from torchtrim.emulator.device import current
from torchtrim.errors import ApplyFailed, Unsupported, UsageError
from torchtrim.evidence.script_state import ScriptState
from torchtrim.executor.apply import apply_plan, fingerprint_of
from torchtrim.executor.registry import Handle
from torchtrim.records.plan import Plan
from torchtrim.records.profile import is_emulated
from torchtrim.records.trial import Request, Trial
from torchtrim.runner.fake_process_group import Sharder, reduce_in_place
from torchtrim.runner.phases import GrowthPhase, InputPhase
from torchtrim.runner.settings import note_uninitialized, prepare
from torchtrim.runner.steps import ComparedSteps, StepMeasure

_BY_HAND = (
    "no optimizer of torch.optim steps, so a step ends where the script changed parameters itself"
)
_RANKS = (
    "of the first rank, whose shards are the largest; what the communication library keeps for itself is "
    "not counted"
)
Progress = Callable[[str], None]
Event = TypeVar("Event", bound=Callable[..., None])


def _forwarded(event: Event) -> Event:
    """Return the method of a forwarder that passes an event on to each of its listeners, in their order."""
    name = event.__name__

    def tell(self: Forwarder, *args: Any) -> None:
        for listener in self.listeners():
            getattr(listener, name)(*args)

    return cast(Event, tell)


class Forwarder(Listener):
    """Forwards events to whoever listens in the current phase."""

    def listeners(self) -> Iterator[Listener]:
        """The listeners of the current phase, in the order in which they are told."""
        yield from ()

    module_starts = _forwarded(Listener.module_starts)
    module_ends = _forwarded(Listener.module_ends)
    backward_starts = _forwarded(Listener.backward_starts)
    backward_ends = _forwarded(Listener.backward_ends)
    optimizer_starts = _forwarded(Listener.optimizer_starts)
    optimizer_ends = _forwarded(Listener.optimizer_ends)
    update_starts = _forwarded(Listener.update_starts)
    update_ends = _forwarded(Listener.update_ends)
    loader_appears = _forwarded(Listener.loader_appears)
    loader_begins = _forwarded(Listener.loader_begins)
    loader_waited = _forwarded(Listener.loader_waited)


class Session(Forwarder, Listener):
    """Leads a whole run. `done` is called once when all steps are there.

    With `frames` a step is over where these say that a frame is, and not where optimizers have stepped.
    `ours` gives the storages that torchtrim itself keeps: they are in no figure but the process's own.
    """

    def __init__(
        self,
        request: Request,
        setting: Setting,
        *,
        folder: Path | None = None,
        done: Callable[[], None] = lambda: None,
        progress: Progress = lambda _: None,
        trains: bool = True,
        frames: StreamFrames | None = None,
        ours: Callable[[], Sequence[Any]] = lambda: (),
    ) -> None:
        self.trial = Trial(request=request, device=setting.device)
        self.modules = Modules()
        self.watcher = Watcher(self, trains=trains)
        self.refused: ApplyFailed | None = None
        self._setting = setting
        self._frames = frames
        self._frame_over = False
        self._done = done
        self._progress = progress
        self._places = Places(setting.project)
        script = ScriptState(self._places, self.modules.number) if setting.script else None
        self._measure = StepMeasure(self.trial, self.modules, self._places, setting, ours)
        self._compared = ComparedSteps(
            self.trial, self.modules, self._measure.clock, folder, script, trains=trains
        )
        self._applied: list[Handle] = []
        self._over = False
        self._times: Times | None = None
        self._input = InputPhase(self._places, self.watcher.aside)
        self._replicas = Replicas()
        steps = request.total if request.grows and trains else 0
        self._growth = GrowthPhase(steps, self._places, lambda: self.watcher.roots)
        self.trial.notes += (_RANKS,) if request.ranks else ()
        self._sharder = Sharder(request.sharding) if request.sharding is not None else None

    def listeners(self) -> Iterator[Listener]:
        yield self._input
        if (recording := self._measure.running) is not None:
            yield recording
        if self._compared.listens:
            yield self._compared

    def root_appears(self, root: nn.Module) -> None:
        prepare(root, self.trial.request)
        name = self.modules.add_root(root)
        self.trial.fingerprint[name] = fingerprint_of(root)
        self.trial.notes += note_uninitialized(root)
        self._check(name)
        self._compared.begins(name, root)
        self._apply(name, root)
        if len(self.modules.roots) == 1:
            self._settle_device(root)
        self._shard(name, root)

    def _shard(self, name: str, root: nn.Module) -> None:
        """Shard it over the ranks that there seem to be, if that is wanted."""
        if self.trial.request.ranks:
            reduce_in_place(root)
        if self._sharder is None:
            return
        try:
            self._sharder.shard(name, root)
        except (UsageError, Unsupported) as error:
            self.refused = ApplyFailed(str(error))
            raise self.refused from error
        self.trial.sharded = tuple(self._sharder.blocks)

    def optimizer_appears(self, optimizer: torch.optim.Optimizer) -> None:
        if self._sharder is not None:
            self._sharder.adopt(optimizer)
        known = self.watcher.optimizers
        self._apply(names_of(known)[known.index(optimizer)], optimizer)

    def training_begins(self) -> None:
        self._next()

    def step_idles(self) -> None:
        """Stop measuring: what comes until the next step is evaluation."""
        if self._input.runs:
            self._input.idles()
        elif self._growth.runs:
            pass
        elif self._times is not None:
            self.finish()
        else:
            self._measure.idle()

    def step_ends(self) -> None:
        """Close the step, and begin the next or call `done`."""
        if self._times is not None:
            phases = (self._growth, self._input)
            next((one for one in phases if one.runs), self._times).step_ends()
            self._go_on_or_finish(self._times)
            return
        evidence, optimizers = self._compared.evidence, self.watcher.optimizers
        self._measure.stop()
        self._replicas.look(self.modules)
        self._measure.close(evidence.step, optimizers)
        if not self.trial.request.dry:
            with torch.no_grad():
                evidence.state(optimizers)
        self.trial.steps.append(evidence.next_step())
        self._input.step_is_timed()
        self._growth.step_ended(self.trial.steps[-1].peak_bytes)
        request = self.trial.request
        if request.round_trip and len(self.trial.steps) == request.total - 1:
            evidence.round_trip(optimizers)
        if self.complete:
            self._note_counts()
            self._times = Times(self._more_times(), self.trial.seconds, self._places)
            self._go_on_or_finish(self._times)
        else:
            self._next()

    @property
    def complete(self) -> bool:
        """Whether all steps are there; others may be recorded for their times."""
        return len(self.trial.steps) >= self.trial.request.total

    @property
    def times_more(self) -> bool:
        """Whether a step is being recorded for its times."""
        return self._times is not None and not self._over

    def _more_times(self) -> int:
        """How many steps more are worth recording: nothing takes its real time on an emulated device."""
        if self.trial.profile is None or is_emulated(self.trial.device) or self.trial.request.dry:
            return 0
        return self.trial.request.times

    def _go_on_or_finish(self, times: Times) -> None:
        """Begin a step that is wanted besides those that are compared, or finish."""
        if self._growth.next(self.trial.seconds) or times.next():
            return
        if not self._input.next(self._compares_input(), self.trial):
            self.finish()
            self._done()

    def _is_late(self, times: Times) -> bool:
        """Whether the step that is wanted besides takes so long that the loop does something else."""
        return times.late() or self._input.late() or self._growth.late()

    def _compares_input(self) -> bool:
        """Whether steps with and without their loader are worth running."""
        request = self.trial.request
        wanted = request.times or request.tunes is not None
        return bool(wanted) and not (request.dry or is_emulated(self.trial.device))

    def finish(self) -> Trial:
        """Stop whatever runs, and complete the trial."""
        if not self._over:
            self._over = True
            self._measure.abandon()
            self._note_times()
            self._note_plans()
            if self.trial.profile is None:
                self.trial.profile = self._measure.fallback
            self._growth.step_ends()
            if self.trial.profile is not None:
                profile = self._replicas.put_into(self.trial.profile, self.modules)
                self.trial.profile = self._growth.into(profile)
            if not self.complete:
                self._note_counts()
        return self.trial

    def _note_counts(self) -> None:
        seen, trial = self.watcher, self.trial
        trial.notes += (_BY_HAND,) if seen.steps_by_hand and not seen.optimizers else ()
        trial.forwards, trial.elsewhere = seen.forwards, seen.elsewhere
        trial.backwards = seen.backwards + seen.gradients
        trial.rss_bytes = rss_bytes()

    def _note_times(self) -> None:
        if self._times is not None:
            self._times.abandon()
            self._input.end(self.trial)
            if self.trial.profile is not None:
                timed = with_times(self.trial.profile, self._times.steps)
                self.trial.profile = replace(timed, loader=self.trial.loader)

    def _note_plans(self) -> None:
        """What plans of the roots' calls say, where such are applied."""
        if not self._frames or self.trial.request.plan is None:
            return
        from torchtrim.executor.network.planned import Planned

        known = [found for root in self.watcher.roots if (found := Planned.known(root)) is not None]
        needed = [found.peak_bytes for found in known]
        self.trial.call_bytes = max((n for n in needed if n is not None), default=None)
        self.trial.notes += tuple(note for found in known for note in found.reasons())
        self.trial.notes += tuple(
            f"{type(root).__name__} is in training mode, and its calls run as they are: call eval() first"
            for root in self.watcher.roots
            if root.training
        )

    @property
    def stepped(self) -> bool:
        """Whether a step is over that was not closed, since nothing came after it."""
        return self._frame_over or self.watcher.stepped

    def partial(self) -> Recording | None:
        """The recording that runs."""
        return self._measure.recording

    def revert(self) -> None:
        """Take the plan back."""
        while self._applied:
            self._applied.pop().revert()

    def _settle_device(self, root: nn.Module) -> None:
        """Where no device was named it is the first root's."""
        emulation = current()
        if emulation is not None and is_emulated(self._setting.device):
            emulation.adopt(root)
        if not self._setting.device:
            parameter = next(root.parameters(), None)
            device = str(parameter.device) if parameter is not None else "cpu"
            if emulation is not None and device.startswith("cuda"):
                device = emulation.device
            self._setting = self._setting._replace(device=device)
            self._measure.settle(self._setting)
        self.trial.device = self._setting.device

    def _check(self, name: str) -> None:
        """Refuse a plan that was made for another root."""
        plan = self.trial.request.plan
        if plan is None:
            return
        expected = plan.fingerprint.get(name)
        same = expected == self.trial.fingerprint[name] or self.trial.request.double
        if expected is not None and not same:
            self.refused = ApplyFailed(
                f"the plan was made for another {name}: its modules or shapes have changed "
                f"(fingerprint {self.trial.fingerprint[name]}, the plan has {expected}). Plan again; "
                f"or, if you know that it still fits, delete `{name}` under [fingerprint]."
            )
            raise self.refused

    def _apply(self, name: str, root: nn.Module | torch.optim.Optimizer) -> None:
        plan = self.trial.request.plan
        if plan is None:
            return
        try:
            self._applied.append(self._planned(plan, name, root))
        except ApplyFailed as error:
            self.refused = error
            raise

    def _planned(self, plan: Plan, name: str, root: nn.Module | torch.optim.Optimizer) -> Handle:
        request = self.trial.request
        if request.exported and name in plan.fingerprint and isinstance(root, nn.Module):
            return apply_exported(request.exported, root, name, check=not request.double)
        return apply_plan(plan, {name: root}, by_hand=request.by_hand)

    def _next(self) -> None:
        number = len(self.trial.steps)
        request = self.trial.request
        self._progress(f"step {number + 1} of {request.total}")
        self._measure.begin(self.watcher.optimizers)

    def module_starts(self, module: nn.Module, args: Any, kwargs: Any, depth: int) -> None:
        if self._frame_over and depth == 0:
            self._frame_over = False
            self.step_ends()
        if self._times is not None and depth == 0 and self._is_late(self._times):
            self.finish()
        if self._over:
            self._done()
        super().module_starts(module, args, kwargs, depth)

    def module_ends(self, module: nn.Module, output: Any, depth: int) -> None:
        super().module_ends(module, output, depth)
        if self._frames is not None and self._frames.ends(module, depth):
            self._frame_over = output is not None

    def optimizer_ends(self, optimizer: torch.optim.Optimizer) -> None:
        self.trial.optimizer_steps += not self.complete
        super().optimizer_ends(optimizer)

    def batch(self, iterator: Any, following: Callable[[Any], Any]) -> Any:
        return self._input.batch(iterator, following)


def apply_exported(path: str, root: nn.Module, name: str, *, check: bool) -> Handle:
    """What the `apply` of the module of that file returns. Raises `ApplyFailed`."""
    module = _module_of(path)
    try:
        handle: Handle = module.apply(root, name, check=check)
    except module.ApplyFailed as error:
        raise ApplyFailed(str(error)) from error
    return handle


def _module_of(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location("exported_plan", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
