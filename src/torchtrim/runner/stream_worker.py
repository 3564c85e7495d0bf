"""A stream in the script's own process: `python -m torchtrim.runner.stream_worker FOLDER LIFELINE`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
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
from torchtrim.runner.script import OUTCOME, STATUS, TASK
from torchtrim.runner.worker import Stop, crash_of, run_in_folder, run_target, seed_all
from torchtrim.stream.lifetimes import bounded, unbounded
from torchtrim.techniques.bounded_state import TECHNIQUE, knows

KEPT = "kept"


class StreamTask(Struct, frozen=True, kw_only=True):
    """What the parent asks for. `bounds`: as the script has them, `on` also for what it leaves unbounded,
    `off` for none at all. `keep`: the frame whose results are wanted, -1 for none."""

    target: str
    module: bool
    args: tuple[str, ...]
    project: str
    frames: int
    frames_of: str | None = None
    bounds: str = "script"
    plan: Plan | None = None
    compare: bool = False
    keep: int = -1


class StreamTrial(Struct, kw_only=True):
    """What one run left: what grew, a digest of each frame's results, the bounded state."""

    profile: Profile | None = None
    stream: StreamReport | None = None
    digests: list[str] = []
    frames: int = 0
    what: str = ""
    bounded: tuple[str, ...] = ()
    seeds: str = "torchtrim"
    crash: Crash | None = None


class _Watching(Growing):
    """Binds what the script leaves unbounded, as its models appear."""

    def __init__(self, task: StreamTask, **options: Any) -> None:
        super().__init__(frames=task.frames, project=task.project, **options)
        self.digests: list[str] = []
        self._task = task
        self._handles: list[Handle] = []

    def root_appears(self, root: nn.Module) -> None:
        """See `Listener`."""
        if self._task.bounds != "on":
            return
        for model in (root, *trackers_of(root)):
            if knows(model) or self._planned(model):
                self._bind(model)

    def _bind(self, model: nn.Module) -> None:
        name = type(model).__name__
        technique = self._planned(model) or Technique(name=TECHNIQUE.name, where=(name,))
        self._handles.append(TECHNIQUE.apply({name: model}, technique))

    def _planned(self, model: nn.Module) -> Technique | None:
        techniques = self._task.plan.techniques if self._task.plan else ()
        name = type(model).__name__
        return next((t for t in techniques if t.name == TECHNIQUE.name and name in t.where), None)


class StreamRunner:
    """Runs one task, and writes its outcome into the folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._task = msgspec.json.decode((folder / TASK).read_bytes(), type=StreamTask)
        self._trial = StreamTrial()
        self._written = False
        self._growing = _Watching(
            self._task, frames_of=self._task.frames_of, ended=self._ended, done=self._done
        )

    def run(self) -> None:
        """Run the script until its frames are done, it ends or it fails; leave the outcome."""
        seed_all()
        crash = None
        with self._bounds(), self._growing:
            try:
                run_target(self._task.target, self._task.module, self._task.args)
            except Stop:
                pass
            except SystemExit as ended:
                if ended.code not in (None, 0):
                    crash = Crash(kind="exited", message=f"the script exited with {ended.code!r}")
            except ApplyFailed as error:
                crash = Crash(kind="refused", message=str(error))
            except BaseException as error:
                crash = crash_of(error)
            self._write(crash)

    @contextlib.contextmanager
    def _bounds(self) -> Iterator[None]:
        with unbounded() if self._task.bounds == "off" else contextlib.nullcontext():
            yield

    def _ended(self, frame: int, output: Any) -> None:
        (self._folder / STATUS).write_text(f"frame {frame + 1} of {self._task.frames}")
        if not self._task.compare:
            return
        tensors = [one for one in tensors_in(output) if one.layout is torch.strided]
        with torch.no_grad():
            self._growing.digests.append(" ".join(map(digest_of, tensors)))
            if frame == self._task.keep:
                self._keep(tensors)

    def _keep(self, tensors: list[torch.Tensor]) -> None:
        for number, tensor in enumerate(tensors):
            real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
            wide = real.double()
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
        trial, growing = self._trial, self._growing
        trial.crash, trial.frames, trial.what = crash, growing.frames, growing.clock.what
        trial.bounded = tuple(sorted(bounded))
        trial.digests = growing.digests
        if crash is None:
            try:
                check_frames(growing)
            except TorchtrimError as error:
                trial.crash = Crash(kind="no step", message=str(error))
        trial.profile = profile_of(growing, script=self._task.target, project=self._task.project)
        trial.stream = stream_of(growing, trial.profile)
        write_atomically(self._folder / OUTCOME, msgspec.json.encode(trial))


def main() -> None:
    """Run the task that the command line names."""
    run_in_folder(lambda folder: StreamRunner(folder).run())


if __name__ == "__main__":
    main()
