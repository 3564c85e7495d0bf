"""Records one step of a loop in the test itself.

profile = record(lambda: train(sample, optimizer, steps=3))
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from models import Sample, train
from torchtrim.capture.allocator import Allocator
from torchtrim.capture.build import Setting
from torchtrim.capture.modules import Modules
from torchtrim.capture.recording import Recording
from torchtrim.capture.watch import Listener, Watcher
from torchtrim.dispatch.places import Places
from torchtrim.records.profile import Operator, Profile, Storage, check

TESTS = str(Path(__file__).parent.parent)


class Loop(Listener):
    """Listens to a loop, and records the step after `warmup` others."""

    def __init__(self, *, warmup: int = 1, allocator: Allocator | None = None) -> None:
        self.modules = Modules()
        self.watcher = Watcher(self)
        self.profile: Profile | None = None
        self.steps = 0
        self.recording: Recording | None = None
        self._warmup = warmup
        self._allocator = allocator
        self._places = Places(TESTS)

    def finish(self) -> Profile:
        """The profile; a step that still runs ends here."""
        if self.profile is None:
            self.step_ends()
        assert self.profile is not None
        assert check(self.profile) is None
        return self.profile

    def root_appears(self, root: nn.Module) -> None:
        self.modules.add_root(root)
        if self.recording is None and self.profile is None:
            self._begin()

    def step_ends(self) -> None:
        recording, self.recording = self.recording, None
        if recording is None:
            return
        self.steps += 1
        if self.steps > self._warmup:
            self.profile = recording.end(self.watcher.optimizers)
        else:
            recording.abandon()
            self._begin()

    def _begin(self) -> None:
        setting = Setting("cpu", "test", TESTS)
        self.recording = Recording(self.modules, self._places, setting, self._allocator)
        self.recording.begin(self.watcher.optimizers, scan=self.steps == self._warmup)

    def module_starts(self, module: nn.Module, args: Any, kwargs: Any, depth: int) -> None:
        if self.recording is not None:
            self.recording.module_starts(module, args, kwargs, depth)

    def module_ends(self, module: nn.Module, output: Any, depth: int) -> None:
        if self.recording is not None:
            self.recording.module_ends(module, output, depth)

    def backward_starts(self, tensors: tuple[torch.Tensor, ...]) -> None:
        if self.recording is not None:
            self.recording.backward_starts(tensors)

    def backward_ends(self) -> None:
        if self.recording is not None:
            self.recording.backward_ends()

    def optimizer_starts(self, optimizer: torch.optim.Optimizer) -> None:
        if self.recording is not None:
            self.recording.optimizer_starts(optimizer)

    def optimizer_ends(self, optimizer: torch.optim.Optimizer) -> None:
        if self.recording is not None:
            self.recording.optimizer_ends(optimizer)

    def loader_waited(self, start_ns: int, end_ns: int, workers: int) -> None:
        if self.recording is not None:
            self.recording.loader_waited(start_ns, end_ns, workers)


def record(
    loop: Callable[[], Any], *, warmup: int = 1, allocator: Allocator | None = None
) -> Profile:
    """The profile of the step after `warmup` others. `loop` runs all of them, and may run more."""
    listener = Loop(warmup=warmup, allocator=allocator)
    try:
        with listener.watcher:
            loop()
            return listener.finish()
    finally:
        if listener.recording is not None:
            listener.recording.abandon()
        gc.collect()


def operators(profile: Profile, phase: str, name: str = "") -> list[Operator]:
    """The operators of a phase whose name starts so."""
    return [op for op in profile.operators if op.phase == phase and op.name.startswith(name)]


def made_by(profile: Profile, name: str, phase: str = "forward") -> list[Storage]:
    """The storages that operators of that name made in a phase, in order."""
    found = {
        use.storage: profile.storages[use.storage]
        for i, op in enumerate(profile.operators)
        if op.phase == phase and op.name.startswith(name)
        for use in op.outputs
        if profile.storages[use.storage].birth == i
    }
    return list(found.values())


def kinds(storages: Sequence[Storage]) -> list[str]:
    """The kinds of the storages."""
    return [storage.kind for storage in storages]


def linear_relu() -> Sample:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    return Sample(model, torch.randn(5, 4), torch.randint(3, (5,)))


def trained(sample: Sample, **options: bool) -> Profile:
    optimizer = torch.optim.Adam(sample.model.parameters(), **options)
    return record(lambda: train(sample, optimizer, steps=2))


def named(profile: Profile, kind: str) -> dict[str, Storage]:
    return {storage.name: storage for storage in profile.storages if storage.kind == kind}
