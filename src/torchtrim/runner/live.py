"""Checks of steps within a run: a copy of the process runs the next step without the plan, another copy runs
it with the plan, and then the run continues with that step unchanged."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import random
import select
import signal
import stat
import statistics
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn

import msgspec
import torch
from torch import nn

from torchtrim.capture.watch import Listener
from torchtrim.errors import Unsupported
from torchtrim.evidence.evidence import Evidence, keep_value
from torchtrim.records.plan import Plan
from torchtrim.records.trial import TrialStep
from torchtrim.runner.planned_script import Applier, EndOfScript
from torchtrim.runner.regions import Region, RegionResult, Regions

Found = Literal["equal", "different", "unchecked"]
# A copy's limit: a minute for its digests, and 20 steps' time on one thread, since it runs single-threaded.
_SECONDS, _TIMES = 60.0, 20.0
_STEPS = 16  # recent steps whose median is the usual time
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_EFFECTS_NAMES = """
    os.remove os.rename os.rmdir os.mkdir os.link os.symlink os.truncate os.chmod os.chown os.kill os.killpg
    os.system os.exec os.posix_spawn os.fork os.forkpty subprocess.Popen shutil.rmtree shutil.move
    shutil.copyfile socket.connect socket.bind socket.sendto sqlite3.connect tempfile.mkstemp tempfile.mkdtemp
"""
_EFFECTS = frozenset(_EFFECTS_NAMES.split())


class Shadow(msgspec.Struct, kw_only=True):
    """A copy's result.

    `failed`: error raised by the step. `effect`: an effect outside the process, in the middle of the step,
    before which the copy stopped. `bytes`: upper bound of the copy's own memory.
    """

    step: TrialStep = msgspec.field(default_factory=TrialStep)
    failed: str = ""
    effect: str = ""
    bytes: int = 0


class StepVerdict(NamedTuple):
    """Verdict on one step, and its reason; `bytes`: memory of the larger copy."""

    found: Found
    reason: str
    bytes: int = 0


class ShadowTask(NamedTuple):
    """Task of a copy: the step with the plan or without, and the values to keep in a folder."""

    planned: bool
    keep: tuple[str, ...] = ()
    folder: Path = Path()


RunShadow = Callable[[ShadowTask], Shadow | None]


class Live(Applier, Listener):
    """Applier of a plan that has every `every`-th step judged before it runs.

    `judge` gets a function that runs a step in a copy, and returns None if the copy died. `differs` gets the
    number and verdict of a step that differs, and may revert the plan or stop the run.
    """

    def __init__(
        self,
        plan: Plan,
        every: int,
        judge: Callable[[RunShadow], StepVerdict],
        judge_region: Callable[[RegionResult], StepVerdict],
        differs: Callable[[Live, int, StepVerdict], None],
    ) -> None:
        super().__init__(plan, stays=True)
        self.checked: list[tuple[int, StepVerdict]] = []
        self.seconds: list[float] = []
        self._every = every
        self._judge = judge
        self._judge_region = judge_region
        self._regions: Regions | None = None
        self._region: Region | None = None
        self._differs = differs
        self._steps = 0
        self._began = self._step_began = time.perf_counter()
        self._step_seconds: list[float] = []
        self._copy: int | None = None
        self._plain = self._ours = False
        self._evidence: Evidence | None = None

    @property
    def alone(self) -> bool:
        return self._copy is None

    def root_appears(self, root: nn.Module) -> None:
        if _stays_in_process(root) and self._regions is None:
            self._regions = Regions(self._plan, self.modules.roots)
        super().root_appears(root)

    def training_begins(self) -> None:
        self._began = self._step_began = time.perf_counter()
        self._next()

    def step_ends(self) -> None:
        if self._copy is not None:
            self._finish()
        self._close_region(StepVerdict("unchecked", _NOT_REACHED))
        took = time.perf_counter() - self._step_began
        self._step_seconds = [*self._step_seconds[1 - _STEPS :], took]
        self._steps += 1
        self._next()

    def _next(self) -> None:
        if (self._steps + 1) % self._every == 0 and self._applied:
            if self._regions is not None:
                self._region = self._regions.next()
                if self._region is None:
                    self._note(StepVerdict("unchecked", _NO_MODULE), 0.0)
                return
            begin = time.perf_counter()
            try:
                verdict = self._judge(self._ask)
            except _InCopy:
                return
            self._note(verdict, time.perf_counter() - begin)
        self._step_began = time.perf_counter()

    def _note(self, verdict: StepVerdict, seconds: float) -> None:
        self.seconds.append(seconds)
        self.checked.append((self._steps + 1, verdict))
        share = sum(self.seconds) / max(time.perf_counter() - self._began, 1e-9)
        tell(
            f"step {self._steps + 1}: {verdict.reason} (checked in {seconds:.2f} s, {share:.1%} "
            f"of the run so far, and at most {verdict.bytes / 2**20:.0f} MiB more)"
        )
        if verdict.found == "different":
            self._differs(self, self._steps + 1, verdict)

    def backward_ends(self) -> None:
        """Judge the region of a step that is checked without a copy of the process."""
        if self._region is not None and (found := self._region.result()) is not None:
            self._close_region(self._judge_region(found))

    def _close_region(self, verdict: StepVerdict) -> None:
        region, self._region = self._region, None
        if region is not None:
            region.end()
            self._note(verdict, region.seconds)

    @property
    def is_in_step(self) -> bool:
        """True if steps are checked within themselves, so that a difference is found after backward."""
        return self._regions is not None

    def _ask(self, task: ShadowTask) -> Shadow | None:
        usual = statistics.median(self._step_seconds or [1.0]) * torch.get_num_threads()
        answer = _copy_process(_SECONDS + _TIMES * usual)
        if isinstance(answer, int):
            self._become(answer, task)
            raise _InCopy
        return None if answer is None else msgspec.json.decode(answer, type=Shadow)

    def _apply(self, name: str, root: nn.Module | torch.optim.Optimizer) -> None:
        if not self._plain:
            super()._apply(name, root)

    def take_back(self) -> None:
        """Revert the plan, and stop checking."""
        self.revert()
        self.watcher.remove()

    def _become(self, pipe: int, task: ShadowTask) -> None:
        """Prepare this process, the copy, for the step. `pipe`: its end of the pipe to the run."""
        self._copy, self._plain = pipe, not task.planned
        self.watcher.follow()
        sys.dont_write_bytecode = True
        torch.set_num_threads(1)
        if self._plain:
            self.revert()

        def keep(name: str, tensor: torch.Tensor) -> None:
            if name in task.keep:
                self._ours = True
                keep_value(task.folder / f"kept-{task.keep.index(name)}", tensor)
                self._ours = False

        self._evidence = Evidence(self.modules, keep if task.keep else None)
        sys.addaudithook(self._audit)
        writer = torch.serialization._open_zipfile_writer

        def opened(target: Any) -> Any:
            if isinstance(target, str | os.PathLike):
                self._outside(f"saves {target}")
            return writer(target)

        torch.serialization._open_zipfile_writer = opened  # type: ignore[assignment]

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        """End the copy at an audit event of Python that changes something outside the process."""
        if self._ours:
            return
        if event == "open":
            path, _, flags = args
            writes = isinstance(flags, int) and flags & _WRITES
            if writes and not isinstance(path, int) and str(path) != os.devnull:
                self._outside(f"writes {path}")
        elif event in _EFFECTS:
            self._outside(f"calls {event}{args[:1]}")

    def _outside(self, effect: str) -> NoReturn:
        """End the copy before an effect: the step may be complete by then, or in the middle."""
        if self.watcher.would_end:
            self._finish()
        self._answer(Shadow(effect=effect))

    def _finish(self) -> NoReturn:
        assert self._evidence is not None
        evidence, self._evidence = self._evidence, None
        with torch.no_grad(), torch.utils._python_dispatch._disable_current_modes():
            evidence.state(self.watcher.optimizers)
        self._answer(Shadow(step=evidence.step))

    def _answer(self, shadow: Shadow) -> NoReturn:
        assert self._copy is not None
        self._ours = True
        shadow.bytes = _own_bytes()
        view = memoryview(msgspec.json.encode(shadow))
        while view:
            view = view[os.write(self._copy, view) :]
        os._exit(0)  # without closing or cleaning up anything of the script

    def ended(self, error: BaseException | None) -> None:
        """See `Applier`; in a copy, the script's end ends the step."""
        if self._copy is None:
            super().ended(error)
            return
        if error is None or self.watcher.would_end:
            self._finish()
        self._answer(Shadow(failed="".join(traceback.format_exception_only(error)).strip()))

    def loader_asked(self, workers: int) -> None:
        if self._copy is not None and (workers or self.watcher.would_end):
            self._outside(f"takes a batch from {workers} processes in the middle of a step")

    def module_starts(self, module: nn.Module, args: Any, kwargs: Any, depth: int) -> None:
        if self._evidence is not None:
            self._evidence.is_called(module, depth)
        if depth == 0:
            self._look("module_starts", module, args, kwargs, depth)

    def module_ends(self, module: nn.Module, output: Any, depth: int) -> None:
        if depth == 0:
            self._look("module_ends", module, output, depth)

    def backward_starts(self, tensors: tuple[torch.Tensor, ...]) -> None:
        self._look("backward_starts", tensors)

    def optimizer_ends(self, optimizer: torch.optim.Optimizer) -> None:
        self._look("optimizer_ends", optimizer)

    def update_ends(self, optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> None:
        self._look("update_ends", optimizer, parameter)

    def _look(self, told: str, *args: Any) -> None:
        if self._evidence is not None:
            with torch.utils._python_dispatch._disable_current_modes():
                getattr(self._evidence, told)(*args)


class _InCopy(Exception):
    """Raised to leave `judge` in a copy."""


_INSTEAD = "Leave it out, and compare some steps before: `torchtrim verify` with the same --plan."
_NO_MODULE = (
    "not checked: the plan changes no module, and other changes are not checked on a device"
)
_NOT_REACHED = "not checked: no backward reached the region that was to be checked"


def _stays_in_process(root: nn.Module) -> bool:
    """Return True where a copy of the process would not have the root's tensors, or cannot be made.

    Raises `EndOfScript` for a rank, which neither way can check: gradients are of all ranks.
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        raise EndOfScript(Unsupported(f"--verify-every does not support several ranks. {_INSTEAD}"))
    tensors = (*root.parameters(), *root.buffers())
    on_device = any(one.device.type not in ("cpu", "meta") for one in tensors)
    return on_device or sys.platform != "linux" or not Path("/proc/self/fd").is_dir()


def tell(text: str) -> None:
    """Print a message about the run's checks on stderr."""
    print(f"torchtrim: {text}", file=sys.stderr, flush=True)


_MAP_FIXED = 0x10  # of Linux's mman.h, which Python's mmap lacks
_PR_SET_PDEATHSIG = 1  # of Linux's prctl.h
_BLOCK = 1 << 16  # a pipe's usual capacity on Linux


def _copy_process(timeout: float) -> int | bytes | None:
    """Fork; return the pipe in the copy, and its answer here: None if the copy died or took too long.

    Python reseeds `random` in a fork; restore the state, for the copy to draw the run's next numbers.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
    read, write = os.pipe()
    drawn = random.getstate()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        os.close(read)
        random.setstate(drawn)
        _isolate(write)
        return write
    os.close(write)
    try:
        data = _read_all(read, time.monotonic() + timeout)
        if data is None:
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    except BaseException:
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        raise
    finally:
        os.close(read)
    return data if data is not None and status == 0 else None


def _own_bytes() -> int:
    """Return an upper bound on the peak of the bytes that this copy does not share."""
    fields = {}
    for name in ("/proc/self/smaps_rollup", "/proc/self/status"):
        with suppress(OSError), Path(name).open() as file:
            for line in file:
                key, _, value = line.partition(":")
                if value.endswith("kB\n"):
                    fields[key] = int(value.split()[0]) * 1024
    freed = fields.get("VmHWM", 0) - fields.get("VmRSS", 0)
    return fields.get("Private_Dirty", 0) + max(freed, 0)


def _read_all(pipe: int, deadline: float) -> bytes | None:
    parts: list[bytes] = []
    while (left := deadline - time.monotonic()) > 0:
        if select.select([pipe], [], [], left)[0]:
            part = os.read(pipe, _BLOCK)
            if not part:
                return b"".join(parts)
            parts.append(part)
    return None


def _isolate(keep: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
        if number not in (keep, nowhere):
            with suppress(OSError):
                _own_file(number, nowhere)
    for shared in list(_shared_maps()):
        _own_memory(libc, shared)


def _own_file(number: int, nowhere: int) -> None:
    """Reopen a file that is only read, at its position; point any other descriptor at /dev/null."""
    mode = os.fstat(number).st_mode
    if stat.S_ISDIR(mode):
        return
    writes = fcntl.fcntl(number, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY
    if not stat.S_ISREG(mode) or writes:
        os.dup2(nowhere, number)
        return
    again = os.open(f"/proc/self/fd/{number}", os.O_RDONLY)
    os.lseek(again, os.lseek(number, 0, os.SEEK_CUR), os.SEEK_SET)
    os.dup2(again, number)
    os.close(again)


class _SharedMapping(NamedTuple):
    """Shared writable mapping; `file` is empty if the mapped file cannot be opened by name."""

    start: int
    size: int
    offset: int
    file: str


def _shared_maps() -> Iterator[_SharedMapping]:
    with Path("/proc/self/maps").open() as file:
        for line in file:
            span, rights, offset, _, _, *name = line.split(maxsplit=5)
            if rights.startswith("rw") and rights[3] == "s":
                start, end = (int(at, 16) for at in span.split("-"))
                path = name[0].rstrip("\n") if name else ""
                named = path.startswith("/") and not path.startswith("/dev/")
                opens = path if named and Path(path).is_file() else ""
                yield _SharedMapping(start, end - start, int(offset, 16), opens)


def _own_memory(libc: ctypes.CDLL, shared: _SharedMapping) -> None:
    place = libc.mmap
    place.restype = ctypes.c_void_p
    place.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    at = shared.start, shared.size, mmap.PROT_READ | mmap.PROT_WRITE
    if shared.file:
        file = os.open(shared.file, os.O_RDONLY)
        place(*at, mmap.MAP_PRIVATE | _MAP_FIXED, file, shared.offset)
        os.close(file)
        return
    contents = ctypes.string_at(shared.start, shared.size)
    if place(*at, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED, -1, 0) == shared.start:
        ctypes.memmove(shared.start, contents, shared.size)
