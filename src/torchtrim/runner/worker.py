"""What runs in the script's own process: `python -m torchtrim.runner.worker FOLDER LIFELINE`."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import os
import random
import runpy
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import CodeType
from typing import Any, NoReturn

import msgspec
import torch

from torchtrim.capture.build import Setting
from torchtrim.capture.growth.stream_frames import StreamFrames
from torchtrim.capture.probes import Probes, Sources
from torchtrim.dispatch.places import line_of
from torchtrim.dryrun.mode import Dry
from torchtrim.dryrun.run import current as current_dry
from torchtrim.dryrun.run import dry_run, sized_loaders
from torchtrim.emulator.device import Emulation
from torchtrim.emulator.orders import Order
from torchtrim.emulator.runtime import model_named
from torchtrim.emulator.start import OnDemand
from torchtrim.errors import is_out_of_memory
from torchtrim.executor.failing import place_of
from torchtrim.records.files import write_atomically
from torchtrim.records.trial import Crash, Request, Trial
from torchtrim.runner.fake_process_group import seeming_ranks
from torchtrim.runner.joining import Joining
from torchtrim.runner.processes import end_with_parent, tells_where
from torchtrim.runner.script import OUTCOME, STATUS, TASK
from torchtrim.runner.session import Session
from torchtrim.runner.settings import (
    NOTE,
    Eagerly,
    Wide,
    fill_uninitialized,
    keep_wide_in_backward,
    load_as_written,
    widen_old_types,
)

SEED = 1_927_031
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4
_KEEPS = ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, 2**31 - 1), (_TOP_PAD, 2**26))


_HELPERS = ("multiprocessing.", "concurrent.", "torch.utils.data", "torch._inductor")
"""Modules whose processes read data or serve; none of them trains."""


class ScriptTask(msgspec.Struct, frozen=True, kw_only=True):
    """What the parent asks for."""

    target: str
    module: bool
    args: tuple[str, ...]
    project: str
    request: Request
    world: int = 1


class Stop(BaseException):
    """Raised in the script when all steps are there. No `except Exception` catches it."""


class Runner:
    """Runs one task, and writes its outcome into the folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._task = msgspec.json.decode((folder / TASK).read_bytes(), type=ScriptTask)
        self._written = False
        request = self._task.request
        order = Order.parse(request.streams) if request.streams else None
        self._emulation = Emulation(model_named(request.device), order)
        device = request.device or ""
        if device not in ("", "cpu", "cuda"):
            device = self._emulation.device
        self._eagerly = Eagerly()
        self._processes = OwnProcesses()
        self._joining = Joining(self._task.world)
        self._probes = Probes(request.probes)
        probed = [probe.path for probe in request.probes]
        self._sources = Sources(request.texts, self._probes, probed)
        setting = Setting(device, self._task.target, self._task.project)
        self._session = Session(
            request,
            setting,
            folder=folder,
            done=self._done,
            progress=lambda text: _say(folder, text),
            trains=not request.infers,
            frames=StreamFrames(None) if request.infers else None,
        )

    def run(self) -> None:
        """Run the script until its steps are done, it ends or it fails; leave the outcome."""
        seed_all()
        if not self._task.request.measured:
            keep_freed_memory()
        if self._task.request.double:
            torch.set_default_dtype(torch.float64)
            widen_old_types()
            load_as_written()
            keep_wide_in_backward()
        request = self._task.request
        with self._dry(), seeming_ranks(request.ranks, sharded=request.sharding is not None):
            self._emulate()
            self._sources.install()
            self._eagerly.install()
            fill_uninitialized()
            self._processes.install()
            self._join()
            _say(self._folder, "the script starts")
            self._write(self._run_watched())
        if self._session.complete:
            self._linger()

    def _join(self) -> None:
        """Be one of several ranks, where it is."""
        if self._task.world > 1:
            tells_where(self._folder)
            self._joining.install()

    def _linger(self) -> None:
        """Stay until the parent ends all ranks: others may still read what this one has sent."""
        if self._task.world > 1:
            sys.stdout.flush()
            sys.stderr.flush()
            while True:
                time.sleep(3600)

    def _run_watched(self) -> Crash | None:
        """Run the script; how it failed, None where it did not."""
        crash = None
        wide = Wide() if self._task.request.double else contextlib.nullcontext()
        with self._session.watcher, wide:
            try:
                run_target(self._task.target, self._task.module, self._task.args, self._sources)
            except Stop:
                pass
            except SystemExit as exit_:
                crash = self._exited(exit_)
            except BaseException as error:
                crash = crash_of(error)
            if self._session.stepped and not self._written and crash is None:
                with contextlib.suppress(Stop):
                    self._session.step_ends()
        return crash

    def _dry(self) -> contextlib.AbstractContextManager[Dry | None]:
        """A dry run, if it is to be one. Unlike a live model's, all numbers are the script's own."""
        request, project = self._task.request, self._task.project
        if not request.dry:
            return sized_loaders(request.batch_size)
        return dry_run(project, owned_only=False, batch_size=request.batch_size)

    def _emulate(self) -> None:
        """Emulate a device: at once where that was asked for, else when the script asks for one.

        Not where calls are planned: their graphs are those of a real device.
        """
        device = self._task.request.device
        if self._task.request.infers:
            return
        if device is None and not torch.cuda.is_available():
            OnDemand(self._emulation, self._task.project).arm()
        elif device not in (None, "cpu", "cuda"):
            self._emulation.begin()

    def _done(self) -> NoReturn:
        if self._written:
            self._linger()
            os._exit(0)
        self._write(None)
        raise Stop

    def _write(self, crash: Crash | None) -> None:
        if self._written:
            return
        trial = self._trial(crash)
        trial.seeds = "torchtrim" if torch.initial_seed() == SEED else "script"
        write_atomically(self._folder / OUTCOME, msgspec.json.encode(trial))
        self._written = True

    def _trial(self, crash: Crash | None) -> Trial:
        session = self._session
        recording = session.partial()
        trial = session.trial
        if session.refused is not None:
            refused = session.refused
            crash = Crash(kind="refused", message=str(refused), place=place_of(refused))
        if recording is not None and recording.running and recording.recorder.operators:
            failed = recording.recorder.failure
            if crash is not None or not trial.steps:
                trial.profile = recording.end(session.watcher.optimizers)
            if crash is not None and failed is not None and failed.error in crash.message:
                path, line = _place(failed.spot)
                crash = msgspec.structs.replace(
                    crash,
                    operator=failed.operator,
                    shapes=failed.shapes,
                    phase=failed.phase,
                    path=path,
                    line=line,
                )
        if session.complete:
            crash = None
        session.finish()
        trial.notes += tuple(sorted(self._emulation.notes))
        trial.notes += (NOTE,) if self._eagerly.asked else ()
        trial.notes += self._joining.notes(trial.device)
        if (dry := current_dry()) is not None:
            trial.notes += dry.guesses.notes()
            trial.batch_size = dry.batch_size
        trial.processes = self._processes.started
        trial.observed = self._probes.observed()
        if crash is None and not trial.steps:
            crash = Crash(kind="no step", message="the script ended, and no step was complete")
        trial.crash = crash
        return trial

    def _exited(self, error: SystemExit) -> Crash | None:
        if error.code in (None, 0) or self._session.refused is not None:
            return None
        return Crash(kind="exited", message=f"the script exited with {error.code!r}")


def crash_of(error: BaseException) -> Crash:
    """What the error of a script says."""
    text = "".join(traceback.format_exception(_without_own_frames(error))).strip()
    message = f"{type(error).__name__}: {error}"
    return Crash(
        kind="out of memory" if is_out_of_memory(error) else "crashed",
        message=message,
        traceback=text,
        place=place_of(error),
    )


def run_target(
    target: str, module: bool, args: tuple[str, ...], sources: Sources | None = None
) -> None:
    """Run a script or a module as `python` would, of the sources if they have it."""
    sys.argv = [target, *args]
    if module:
        sys.path[0] = str(Path.cwd())
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(target).resolve().parent)
        if sources is not None and sources.covers(target):
            sources.run(target)
        else:
            runpy.run_path(target, run_name="__main__")


def seed_all() -> None:
    """Seed every generator; a script that seeds its own overrides this."""
    random.seed(SEED)
    torch.manual_seed(SEED)
    with contextlib.suppress(ImportError):
        import numpy

        numpy.random.seed(SEED)


def keep_freed_memory() -> None:
    """Have malloc keep freed memory, since to give it back and have every page cleared anew takes long.

    A script that runs alone has it otherwise, so this is not for runs whose time or memory is measured.
    """
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        for parameter, value in _KEEPS:
            mallopt(parameter, value)


def _say(folder: Path, text: str) -> None:
    (folder / STATUS).write_text(text)


def _place(spot: tuple[CodeType, int] | None) -> tuple[str, int]:
    return ("", 0) if spot is None else (spot[0].co_filename, line_of(spot))


def _without_own_frames(error: BaseException) -> BaseException:
    """The error with a traceback of the script's frames only, where there are any."""
    own = str(Path(__file__).parent.parent)
    frames = []
    step = error.__traceback__
    while step is not None:
        name = step.tb_frame.f_code.co_filename
        if not name.startswith((own, "<frozen")):
            frames.append(step)
        step = step.tb_next
    trace = None
    for frame in reversed(frames):
        trace = type(frame)(trace, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return error.with_traceback(trace or error.__traceback__)


def run_in_folder(run: Callable[[Path], None]) -> None:
    """Run the task in the folder, then end at once: no exit handler of the script's may hang.

    Everything imported until now is hidden from the garbage collector, which is then quick.
    """
    folder, lifeline = Path(sys.argv[1]), int(sys.argv[2])
    gc.freeze()
    if lifeline >= 0:
        end_with_parent(lifeline)
    run(folder)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def main() -> None:
    """Run the task that the command line names."""
    run_in_folder(lambda folder: Runner(folder).run())


class OwnProcesses:
    """Counts them from `install` on, without the workers of loaders and of pools. `remove` stops that."""

    def __init__(self) -> None:
        self.started = 0
        self.remove: Callable[[], None] = lambda: None

    def install(self) -> None:
        """Count them."""
        original: Any = BaseProcess.start

        @functools.wraps(original)
        def start(process: BaseProcess) -> None:
            target = getattr(process, "_target", None)
            home = str(getattr(target, "__module__", type(process).__module__)) + "."
            self.started += not home.startswith(_HELPERS)
            original(process)

        def remove() -> None:
            BaseProcess.start = original  # type: ignore[method-assign]

        counting: Any = start
        BaseProcess.start = counting  # type: ignore[method-assign]
        self.remove = remove


if __name__ == "__main__":
    main()
