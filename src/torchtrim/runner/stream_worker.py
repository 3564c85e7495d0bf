"""Main module of a streaming script's own process: `... stream_worker FOLDER LIFELINE`."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import torch
from msgspec import Struct
from torch import nn

from torchtrim.capture.growth.frames import Growing
from torchtrim.capture.growth.records import check_frames, profile_of, stream_of
from torchtrim.capture.growth.stream_frames import trackers_of
from torchtrim.capture.recording import tensors_in
from torchtrim.errors import ApplyFailed, TorchtrimError
from torchtrim.evidence.evidence import bytes_of, digest_of
from torchtrim.executor.registry import Handle
from torchtrim.records.files import write_atomically
from torchtrim.records.plan import Plan, Technique
from torchtrim.records.profile import Profile
from torchtrim.records.report import StreamReport
from torchtrim.records.trial import Crash
from torchtrim.runner.script import OUTCOME, STATUS, TASK, Target
from torchtrim.runner.worker import Stop, run_in_folder, run_to_crash, seed_all
from torchtrim.stream.lifetimes import bounded, unbounded
from torchtrim.techniques.bounded_state import TECHNIQUE, knows

KEPT = "kept"


class StreamTask(Struct, frozen=True, kw_only=True):
    """The parent's order. `bounds`: `script` leaves state to the script, `on` also bounds the state that
    the script does not, `off` bounds none. `keep`: the frame whose results to keep, or -1."""

    target: Target
    project: str
    frames: int
    frames_of: str | None = None
    bounds: str = "script"
    plan: Plan | None = None
    compare: bool = False
    keep: int = -1


class StreamTrial(Struct, kw_only=True):
    """The outcome of one run: growth, a digest of each frame's results, the bounded state."""

    profile: Profile | None = None
    stream: StreamReport | None = None
    digests: list[str] = []
    frames: int = 0
    what: str = ""
    bounded: tuple[str, ...] = ()
    crash: Crash | None = None


class _Watching(Growing):
    """Observer of growth that bounds the state of models, if requested, as they appear."""

    def __init__(self, task: StreamTask, **options: Any) -> None:
        super().__init__(frames=task.frames, project=task.project, **options)
        self.digests: list[str] = []
        self._task = task
        self._handles: list[Handle] = []

    def root_appears(self, root: nn.Module) -> None:
        if self._task.bounds != "on":
            return
        techniques = self._task.plan.techniques if self._task.plan else ()
        ours = [technique for technique in techniques if technique.name == TECHNIQUE.name]
        for model in (root, *trackers_of(root)):
            name = type(model).__name__
            technique = next((t for t in ours if name in t.where), None)
            if technique is None and knows(model):
                technique = Technique(name=TECHNIQUE.name, where=(name,))
            if technique is not None:
                self._handles.append(TECHNIQUE.apply({name: model}, technique))


class _StreamRunner:
    """Runner of one task, which writes the outcome into the folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._task = msgspec.json.decode((folder / TASK).read_bytes(), type=StreamTask)
        self._written = False
        self._growing = _Watching(
            self._task, frames_of=self._task.frames_of, ended=self._ended, done=self._done
        )

    def run(self) -> None:
        seed_all()
        off = self._task.bounds == "off"
        with unbounded() if off else contextlib.nullcontext(), self._growing:
            self._write(run_to_crash(self._task.target, refusals=(ApplyFailed,)))

    def _ended(self, frame: int, output: Any) -> None:
        (self._folder / STATUS).write_text(f"frame {frame + 1} of {self._task.frames}")
        if not self._task.compare:
            return
        tensors = [one for one in tensors_in(output) if one.layout is torch.strided]
        with torch.no_grad():
            self._growing.digests.append(" ".join(map(digest_of, tensors)))
            for number, tensor in enumerate(tensors if frame == self._task.keep else ()):
                real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
                wide = real.double()  # `bytes_of` is a view of it
                (self._folder / f"{KEPT}{number}").write_bytes(bytes_of(wide))

    def _done(self) -> NoReturn:
        if self._written:
            os._exit(0)
        self._write(None)
        raise Stop

    def _write(self, crash: Crash | None) -> None:
        if self._written:
            return
        self._written = True
        growing, script = self._growing, self._task.target.name
        if crash is None:
            try:
                check_frames(growing)
            except TorchtrimError as error:
                crash = Crash(kind="no step", message=str(error))
        profile = profile_of(growing, script=script, project=self._task.project)
        trial = StreamTrial(
            profile=profile,
            stream=stream_of(growing, profile),
            digests=growing.digests,
            frames=growing.frames,
            what=growing.clock.what,
            bounded=tuple(sorted(bounded)),
            crash=crash,
        )
        write_atomically(self._folder / OUTCOME, msgspec.json.encode(trial))


def main() -> None:
    """Run the task named on the command line."""
    run_in_folder(lambda folder: _StreamRunner(folder).run())


if __name__ == "__main__":
    main()
