"""Main module of a script's own process: `python -m torchtrim.runner.worker FOLDER LIFELINE`."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import os
import random
import runpy
import sys
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import torch

from torchtrim.capture.build import Setting
from torchtrim.capture.growth.stream_frames import StreamFrames
from torchtrim.capture.probes import Probes, Sources
from torchtrim.core.isolation import debugging
from torchtrim.dispatch.patches import Patches
from torchtrim.dispatch.places import line_of
from torchtrim.dispatch.threads import await_others, enter_in_threads, listen_to_errors
from torchtrim.dryrun.mode import Dry
from torchtrim.dryrun.run import current as current_dry
from torchtrim.dryrun.run import dry_run, sized_loaders
from torchtrim.dryrun.workspace import machine
from torchtrim.emulator.device import Emulation
from torchtrim.emulator.orders import StreamOrder
from torchtrim.emulator.runtime import model_named
from torchtrim.emulator.start import OnDemand
from torchtrim.errors import is_out_of_memory
from torchtrim.executor.failing import place_of
from torchtrim.records.files import write_atomically
from torchtrim.records.trial import Crash, Request, Trial
from torchtrim.runner import settings
from torchtrim.runner.compiling import Compiling
from torchtrim.runner.fake_process_group import fake_ranks
from torchtrim.runner.joining import Joining
from torchtrim.runner.processes import end_with_parent, register_stack_dump
from torchtrim.runner.script import OUTCOME, STATUS, TASK, Target
from torchtrim.runner.session import Session
from torchtrim.runner.written import Writing

SEED = 1_927_031  # arbitrary, and unlikely in a script, so that the outcome tells who seeded
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4  # parameters of mallopt in glibc's malloc.h
# No mapped blocks, never trim, and grow the heap by 64 MiB to make system calls rare.
_KEEPS = ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, 2**31 - 1), (_TOP_PAD, 2**26))
_IDLE_SECONDS = 3600  # arbitrary, since the parent kills a lingering rank


_HELPERS = ("multiprocessing.", "concurrent.", "torch.utils.data", "torch._inductor")
"""Modules whose processes read data or serve, and never train."""


_AFTER_CALLS = (
    "after these calls the script failed, as it may where numbers are unknown because nothing is computed: "
    "{crash}"
)


class ScriptTask(msgspec.Struct, frozen=True, kw_only=True):
    """The parent's order: the script, and how to run it."""

    target: Target
    project: str
    request: Request
    world: int = 1


class Stop(BaseException):
    """End of the script after its last step; no `except Exception` catches it."""


class _Runner:
    """Runner of one task, which writes the outcome into the folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._task = msgspec.json.decode((folder / TASK).read_bytes(), type=ScriptTask)
        self._written = False
        self._request = request = self._task.request
        order = StreamOrder.parse(request.streams) if request.streams else None
        self._emulation = Emulation(model_named(request.device), order)
        device = request.device or ""
        if device not in ("", "cpu", "cuda"):
            device = self._emulation.device
        self._writing = Writing(folder, (str(Path.cwd()), self._task.project))
        self._started = 0
        self._joining = Joining(self._task.world)
        self._probes = Probes(request.probes)
        probed = [probe.path for probe in request.probes]
        self._sources = Sources(request.texts, self._probes, probed)
        setting = Setting(device, self._task.target.name, self._task.project)
        self._session = Session(
            request,
            setting,
            folder=folder,
            done=self._done,
            progress=self._say,
            trains=not request.infers,
            frames=StreamFrames(None) if request.infers else None,
            begins=self._step_begins,
        )
        self._compiling = Compiling(request, self._session.watcher, setting.project)

    def run(self) -> None:
        """Run the script until its steps are done, it ends or it fails; leave the outcome."""
        request, world = self._request, self._task.world
        seed_all()
        if not request.measured:
            keep_freed_memory()
        if request.double:
            torch.set_default_dtype(torch.float64)
            settings.widen_old_types()
            settings.load_as_written()
            settings.keep_wide_in_backward()
        dry: contextlib.AbstractContextManager[Dry | None] = sized_loaders(request.batch_size)
        if request.dry:  # unlike a live model's, it owns every number of the script
            size = request.batch_size
            dry = dry_run(self._task.project, owned_only=False, batch_size=size)
        with dry, fake_ranks(request.ranks, sharded=request.sharding is not None):
            self._emulate()
            self._sources.install()
            self._compiling.install()
            settings.fill_uninitialized()
            self._count_processes()
            self._settle_exits()
            if world > 1:
                register_stack_dump(self._folder)
            self._joining.install()
            self._writing.install()
            self._say("the script starts")
            self._run_watched()

    def _step_begins(self) -> None:
        self._writing.step_begins()
        self._compiling.step_begins()

    def _say(self, text: str) -> None:
        (self._folder / STATUS).write_text(text)

    def _count_processes(self) -> None:
        original: Any = BaseProcess.start

        @functools.wraps(original)
        def start(process: BaseProcess) -> None:
            target = getattr(process, "_target", None)
            home = str(getattr(target, "__module__", type(process).__module__)) + "."
            self._started += not home.startswith(_HELPERS)
            original(process)

        counting: Any = start
        BaseProcess.start = counting  # type: ignore[method-assign]

    def _settle_exits(self) -> None:
        """Leave the outcome before the script ends this process with `os._exit`, which raises nothing."""
        original, own = os._exit, os.getpid()

        @functools.wraps(original)
        def leave(status: int) -> NoReturn:
            if os.getpid() == own and not self._written:
                failed = Crash(kind="exited", message=f"the script exited with {status!r}")
                self._end(failed if status else None)
            original(status)

        os._exit = leave

    def _linger(self) -> None:
        """Stay until the parent ends all ranks: other ranks may still read from this one's buffers."""
        if self._task.world > 1:
            sys.stdout.flush()
            sys.stderr.flush()
            while True:
                time.sleep(_IDLE_SECONDS)

    def _run_watched(self) -> None:
        patches, watcher = Patches(), self._session.watcher
        errors: list[BaseException] = []

        def heard(error: BaseException) -> bool:
            if watcher.watches_thread() and not isinstance(error, SystemExit):
                errors.append(error)
            return False

        listen_to_errors(patches, heard)
        double, nudged = self._request.double, self._request.nudged
        if self._request.compiles:
            double, nudged = False, 0  # dynamo traces no mode; parameters and inputs are prepared
        if double:
            enter_in_threads(patches, lambda: settings.precision(double=True, nudged=nudged))
        with watcher, settings.precision(double=double, nudged=nudged):
            crash = run_to_crash(self._task.target, sources=self._sources)
            if crash is None and errors:
                crash = crash_of(errors[0])
            self._end(crash)

    def _end(self, crash: Crash | None) -> None:
        """Close the script's last step and leave the outcome."""
        searches = self._request.searches
        if self._session.stepped and not self._written and (crash is None or searches):
            with contextlib.suppress(Stop):
                self._session.step_ends()
        if crash is not None and searches and self._session.trial.steps:
            self._session.trial.notes += (_AFTER_CALLS.format(crash=crash.message),)
            crash = None
        self._write(crash)
        if self._session.complete:
            self._linger()

    def _emulate(self) -> None:
        """Emulate a device: a requested one at once, else when the script first uses one.

        Not when the script first uses one if its calls are to be planned, on graphs of the real device, nor
        where it compiles: dynamo does not know the classes that stand for a device's.
        """
        device, request = self._request.device, self._request
        if (request.infers and not request.dry and device is None) or request.compiles:
            return
        if device is None and not torch.cuda.is_available():
            OnDemand(self._emulation, self._task.project).arm()
        elif device not in (None, "cpu", "cuda"):
            self._emulation.begin()

    def _done(self) -> NoReturn:
        if self._written:
            self._end_here()
        self._write(None)
        if threading.current_thread() is not threading.main_thread():
            self._end_here()
        raise Stop

    def _end_here(self) -> NoReturn:
        """End the process in a thread: `Stop` would end the thread alone, and the script go on after it."""
        sys.stdout.flush()
        sys.stderr.flush()
        machine().save()
        self._linger()
        os._exit(0)

    def _write(self, crash: Crash | None) -> None:
        if not self._written:
            trial = self._trial(crash)
            trial.seeds = "torchtrim" if torch.initial_seed() == SEED else "script"
            write_atomically(self._folder / OUTCOME, msgspec.json.encode(trial))
            self._written = True

    def _trial(self, crash: Crash | None) -> Trial:
        session = self._session
        recording = session.recording
        trial = session.trial
        if (refused := session.refused) is not None:
            crash = Crash(kind="refused", message=str(refused), place=place_of(refused))
        if recording is not None and recording.running and recording.recorder.operators:
            failed = recording.recorder.failure
            if crash is not None or not trial.steps:
                trial.profile = recording.end(session.watcher.optimizers)
            if crash is not None and failed is not None and failed.error in crash.message:
                spot = failed.spot
                crash = msgspec.structs.replace(
                    crash,
                    operator=failed.operator,
                    shapes=failed.shapes,
                    phase=failed.phase,
                    path="" if spot is None else spot[0].co_filename,
                    line=0 if spot is None else line_of(spot),
                )
        if session.complete:
            crash = None
        session.finish()
        trial.notes += tuple(sorted(self._emulation.notes))
        trial.notes += self._joining.notes(trial.device)
        if (dry := current_dry()) is not None:
            trial.notes += dry.guesses.notes()
            trial.batch_size = dry.batch_size
        trial.processes = self._started
        trial.crash = crash
        if refusal := self._compiling.end(trial):
            crash = Crash(kind="refused", message=refusal)
        trial.observed = self._probes.observed()
        if crash is None and not trial.steps:
            crash = Crash(kind="no step", message="the script ended, and no step was complete")
        trial.crash = crash
        return trial


def run_to_crash(
    target: Target,
    *,
    sources: Sources | None = None,
    refusals: tuple[type[Exception], ...] = (),
) -> Crash | None:
    """Run a script until it ends or raises `Stop`; return its crash, if any.

    `refusals`: exceptions that say that the plan does not fit the script.
    """
    try:
        run_target(target, sources)
        await_others()
    except Stop:
        pass
    except SystemExit as ended:
        if ended.code not in (None, 0):
            return Crash(kind="exited", message=f"the script exited with {ended.code!r}")
    except refusals as error:
        return Crash(kind="refused", message=str(error))
    except BaseException as error:
        return crash_of(error)
    return None


def crash_of(error: BaseException) -> Crash:
    """Return the crash of an exception that ended the script."""
    return Crash(
        kind="out of memory" if is_out_of_memory(error) else "crashed",
        message=f"{type(error).__name__}: {error}",
        traceback="".join(traceback.format_exception(_without_own_frames(error))).strip(),
        place=place_of(error),
    )


def run_target(target: Target, sources: Sources | None = None) -> None:
    """Run a script or a module as `python` would, from `sources` if they cover it."""
    name = target.name
    sys.argv = [name, *target.args]
    if target.module:
        sys.path[0] = str(Path.cwd())
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(name).resolve().parent)
        if sources is not None and sources.covers(name):
            sources.run(name)
        else:
            runpy.run_path(name, run_name="__main__")


def seed_all() -> None:
    """Seed every generator; a script that seeds its own overrides this."""
    seed_with(SEED)


def seed_with(seed: int) -> None:
    """Seed the generators of Python, torch and, if installed, numpy."""
    random.seed(seed)
    torch.manual_seed(seed)
    with contextlib.suppress(ImportError):
        import numpy

        numpy.random.seed(seed)


def keep_freed_memory() -> None:
    """Have malloc keep freed memory, since the kernel takes long to clear returned pages.

    Not for runs whose time or memory is measured: a script that runs alone returns its pages.
    """
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        for parameter, value in _KEEPS:
            mallopt(parameter, value)


def _without_own_frames(error: BaseException) -> BaseException:
    own = str(Path(__file__).parent.parent)
    frames = []
    step = error.__traceback__
    while step is not None and not debugging():
        name = step.tb_frame.f_code.co_filename
        if not name.startswith((own, "<frozen")):
            frames.append(step)
        step = step.tb_next
    trace = None
    for frame in reversed(frames):
        trace = type(frame)(trace, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return error.with_traceback(trace or error.__traceback__)


def run_in_folder(run: Callable[[Path], None]) -> None:
    """Run the task in the folder, then end without the script's exit handlers, which may hang.

    Freezing the objects imported so far makes the garbage collector fast.
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
    """Run the task named on the command line."""
    run_in_folder(lambda folder: _Runner(folder).run())


if __name__ == "__main__":
    main()
