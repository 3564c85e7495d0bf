"""A session: one run's warm-up steps, its recorded step, and the steps that are timed and compared."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from msgspec.structs import replace
from torch import nn

from torchtrim.capture.allocator import rss_bytes
from torchtrim.capture.build import Setting
from torchtrim.capture.constructions import Constructions
from torchtrim.capture.growth.steps import StepGrowth
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
from torchtrim.records.profile import is_emulated
from torchtrim.records.trial import Request, Trial
from torchtrim.runner.fake_process_group import Sharder, reduce_in_place
from torchtrim.runner.phases import InputPhase
from torchtrim.runner.settings import note_uninitialized, prepare
from torchtrim.runner.steps import ComparedSteps, StepMeasure

_BY_HAND = (
    "no optimizer of torch.optim steps, so a step ends where the script changed parameters itself"
)
_RANKS = "of the first rank, whose shards are the largest; without the communication library's own buffers"
_ELSEWHERE = (
    "the script calls modules in several threads, and the figures and the plan are of the thread that began "
    "to train first. Memory that the others hold counts as memory from before the step"
)
Event = TypeVar("Event", bound=Callable[..., None])


def _forwarded(event: Event) -> Event:
    """Return a method of `Session` that forwards an event to the listeners of the current phase."""

    def forward(self: Session, *args: Any) -> None:
        self.forward(event.__name__, *args)

    return cast(Event, forward)


class Session(Listener):
    """Takes a run through its steps and phases. `done` is called once, after the last step.

    With `frames` a step ends with a frame, not with the optimizers' step. `ours` returns torchtrim's own
    storages, which count only in the memory of the process. `begins` is called before each step.
    """

    backward_starts = _forwarded(Listener.backward_starts)
    backward_ends = _forwarded(Listener.backward_ends)
    optimizer_starts = _forwarded(Listener.optimizer_starts)
    update_starts = _forwarded(Listener.update_starts)
    update_ends = _forwarded(Listener.update_ends)
    loader_appears = _forwarded(Listener.loader_appears)
    loader_begins = _forwarded(Listener.loader_begins)
    loader_waited = _forwarded(Listener.loader_waited)

    def __init__(
        self,
        request: Request,
        setting: Setting,
        *,
        folder: Path | None = None,
        done: Callable[[], None] = lambda: None,
        progress: Callable[[str], None] = lambda _: None,
        trains: bool = True,
        frames: StreamFrames | None = None,
        ours: Callable[[], Sequence[Any]] = lambda: (),
        begins: Callable[[], None] = lambda: None,
    ) -> None:
        self._begins = begins
        self.trial = Trial(request=request, device=setting.device)
        self._places = Places(setting.project)
        constructions = Constructions(self._places)
        self.modules = Modules(constructions.site)
        self.watcher = Watcher(
            self, trains=trains, constructions=constructions, follows=bool(setting.script)
        )
        self.refused: ApplyFailed | None = None
        self._setting = setting
        self._frames = frames
        self._frame_over = False
        self._done = done
        self._progress = progress
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
        self._growth = StepGrowth(steps, self._places, lambda: self.watcher.roots)
        self.trial.notes += (_RANKS,) if request.ranks else ()
        self._sharder = Sharder(request.sharding) if request.sharding is not None else None

    def forward(self, event: str, *args: Any) -> None:
        """Forward an event to the input phase, then the recording, then the collector of evidence."""
        getattr(self._input, event)(*args)
        if (recording := self.recording) is not None and recording.running:
            getattr(recording, event)(*args)
        if self._compared.listens:
            getattr(self._compared, event)(*args)

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
        self._compared.evidence.numbered(optimizer)  # before a plan cuts its groups in parts
        known = self.watcher.optimizers
        self._apply(names_of(known)[known.index(optimizer)], optimizer)

    def training_begins(self) -> None:
        self._next()

    def step_idles(self) -> None:
        if self._input.runs:
            self._input.idles()
        elif self._growth.runs:
            pass
        elif self._times is not None:
            self.finish()
        else:
            self._measure.idle()

    def step_ends(self) -> None:
        if self._times is not None:
            phases = (self._growth, self._input)
            next((phase for phase in phases if phase.runs), self._times).step_ends()
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
        self._input.compared_step_ends()
        self._growth.step_ended(self.trial.steps[-1].peak_bytes)
        request = self.trial.request
        if request.round_trip and len(self.trial.steps) == request.total - 1:
            evidence.round_trip(optimizers)
        if self.complete:
            self._note_counts()
            times = request.times if self.trial.profile is not None and self._real_time else 0
            self._times = Times(times, self.trial.seconds, self._places)
            self._go_on_or_finish(self._times)
        else:
            self._next()

    @property
    def complete(self) -> bool:
        """True after the last compared step; more steps may follow, for their times."""
        if (highest := self._measure.highest) is not None:
            return highest.over
        return len(self.trial.steps) >= self.trial.request.total

    @property
    def times_more(self) -> bool:
        """True during the further steps, for their times."""
        return self._times is not None and not self._over

    @property
    def _real_time(self) -> bool:
        return not (self.trial.request.dry or is_emulated(self.trial.device))

    def _go_on_or_finish(self, times: Times) -> None:
        """Begin a further step, for growth, operator times or the loader, or finish."""
        self._progress("further steps")
        if self._growth.next(self.trial.seconds) or times.next():
            return
        request = self.trial.request
        wanted = bool(request.times or request.tunes is not None) and self._real_time
        if not self._input.next(wanted, self.trial):
            self.finish()
            self._done()

    def finish(self) -> Trial:
        if not self._over:
            self._over = True
            self._measure.abandon()
            if self._times is not None:
                self._times.abandon()
                self._input.end(self.trial)
                if self.trial.profile is not None:
                    timed = with_times(self.trial.profile, self._times.steps)
                    self.trial.profile = replace(timed, loader=self.trial.loader)
            self._note_plans()
            if self.trial.profile is None:
                self.trial.profile = self._measure.fallback
            self._growth.step_ends()
            if self.trial.profile is not None:
                profile = self._replicas.put_into(self.trial.profile, self.modules)
                self.trial.profile = self._growth.into(profile)
            if not self.complete:
                self._note_counts()
            if (emulation := current()) is not None:
                self.trial.workspace_bytes = emulation.workspaces.bytes
            if self._measure.highest is not None and self.trial.steps:
                self.trial.notes += (self._measure.highest.note(),)
        return self.trial

    def _note_counts(self) -> None:
        seen, trial = self.watcher, self.trial
        trial.notes += (_BY_HAND,) if seen.steps_by_hand and not seen.optimizers else ()
        trial.forwards, trial.elsewhere = seen.forwards, seen.elsewhere
        trial.notes += (_ELSEWHERE,) if seen.forwards and seen.elsewhere else ()
        trial.backwards = seen.backwards + seen.gradients
        trial.rss_bytes = rss_bytes()

    def _note_plans(self) -> None:
        if not self._frames or self.trial.request.plan is None:
            return
        from torchtrim.executor.network.planned import Planned

        planned = [
            known for root in self.watcher.roots if (known := Planned.known(root)) is not None
        ]
        peaks = [calls.peak_bytes for calls in planned if calls.peak_bytes is not None]
        self.trial.call_bytes = max(peaks, default=None)
        self.trial.notes += tuple(note for calls in planned for note in calls.reasons())
        self.trial.notes += tuple(
            f"{type(root).__name__} is in training mode, so its calls are not planned: call eval() first"
            for root in self.watcher.roots
            if root.training
        )

    @property
    def stepped(self) -> bool:
        """True if a step has ended but is not closed, since no further step began."""
        return self._frame_over or self.watcher.stepped

    @property
    def recording(self) -> Recording | None:
        return self._measure.recording

    def revert(self) -> None:
        while self._applied:
            self._applied.pop().revert()

    def _settle_device(self, root: nn.Module) -> None:
        """Take the device from the first root, if the request has none."""
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
        request = self.trial.request
        plan, exported = request.plan, request.exported
        if plan is None:
            return
        try:
            handle: Handle
            if exported and name in plan.fingerprint and isinstance(root, nn.Module):
                handle = _apply_exported(exported, root, name, check=not request.double)
            else:
                handle = apply_plan(plan, {name: root}, by_hand=request.by_hand)
        except ApplyFailed as error:
            self.refused = error
            raise
        self._applied.append(handle)

    def _next(self) -> None:
        self._progress(f"step {len(self.trial.steps) + 1} of {self.trial.request.total}")
        self._begins()
        self._measure.begin(self.watcher.optimizers)

    def module_starts(self, module: nn.Module, args: Any, kwargs: Any, depth: int) -> None:
        if self._frame_over and depth == 0:
            self._frame_over = False
            self.step_ends()
        if self._times is not None and depth == 0:
            phases = (self._times, self._input, self._growth)
            if any(phase.late() for phase in phases):
                self.finish()
        if self._over:
            self._done()
        self.forward("module_starts", module, args, kwargs, depth)

    def module_ends(self, module: nn.Module, output: Any, depth: int) -> None:
        self.forward("module_ends", module, output, depth)
        if self._frames is not None and self._frames.ends(module, depth):
            self._frame_over = output is not None

    def optimizer_ends(self, optimizer: torch.optim.Optimizer) -> None:
        self.trial.optimizer_steps += not self.complete
        self.forward("optimizer_ends", optimizer)

    def batch(self, iterator: Any, following: Callable[[Any], Any]) -> Any:
        return self._input.batch(iterator, following)


def _apply_exported(path: str, root: nn.Module, name: str, *, check: bool) -> Handle:
    spec = importlib.util.spec_from_file_location("exported_plan", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    try:
        handle: Handle = module.apply(root, name, check=check)
    except module.ApplyFailed as error:
        raise ApplyFailed(str(error)) from error
    return handle
