"""Checks steps of a run that goes on: a copy of the process runs the next step without the plan, another with
it, and the run waits meanwhile. Its own step comes afterwards, as if nothing had happened."""

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

Found = Literal["equal", "different", "unchecked"]
_SECONDS, _TIMES = 60.0, 20.0
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_EFFECTS_NAMES = """
    os.remove os.rename os.rmdir os.mkdir os.link os.symlink os.truncate os.chmod os.chown os.kill os.killpg
    os.system os.exec os.posix_spawn os.fork os.forkpty subprocess.Popen shutil.rmtree shutil.move
    shutil.copyfile socket.connect socket.bind socket.sendto sqlite3.connect tempfile.mkstemp tempfile.mkdtemp
"""
_EFFECTS = frozenset(_EFFECTS_NAMES.split())


class Shadow(msgspec.Struct, kw_only=True):
    """What a copy found. `failed`: the error that the step raised; `effect`: what it would have done outside
    of the process in the middle of the step. `bytes`: at most so many were the copy's own."""

    step: TrialStep = msgspec.field(default_factory=TrialStep)
    failed: str = ""
    effect: str = ""
    bytes: int = 0


class StepVerdict(NamedTuple):
    """On one step: what was found, and why; `largest` is what a copy took at most."""

    found: Found
    reason: str
    bytes: int = 0


class ShadowTask(NamedTuple):
    """What a copy is to do: the step with the plan or without, and which values to keep in a folder."""

    planned: bool
    keep: tuple[str, ...] = ()
    folder: Path = Path()


RunShadow = Callable[[ShadowTask], Shadow | None]


class Live(Applier, Listener):
    """Applies the plan, and has each step whose number is a multiple of `every` judged before it runs.

    `judge` gets a way to ask for a copy's step, None for one that died. `differs` is called with the number
    of the step and the verdict: the plan may be reverted there, or the run stopped.
    """

    def __init__(
        self,
        plan: Plan,
        every: int,
        judge: Callable[[RunShadow], StepVerdict],
        differs: Callable[[Live, int, StepVerdict], None],
    ) -> None:
        super().__init__(plan, stays=True)
        self.checked: list[tuple[int, StepVerdict]] = []
        self.seconds: list[float] = []
        self._every = every
        self._judge = judge
        self._differs = differs
        self._steps = 0
        self._began = self._step_began = time.perf_counter()
        self._step_seconds: list[float] = []
        self._copy: Copy | None = None
        self._plain = self._ours = False
        self._evidence: Evidence | None = None

    @property
    def alone(self) -> bool:
        """Whether this is the run itself, no copy of it."""
        return self._copy is None

    # -- in the run ------------------------------------------------------------------------------

    def root_appears(self, root: nn.Module) -> None:
        _check_copies(root)
        super().root_appears(root)

    def training_begins(self) -> None:
        self._began = self._step_began = time.perf_counter()
        self._next()

    def step_ends(self) -> None:
        if self._copy is not None:
            self._finish()
        self._step_seconds = [*self._step_seconds[-15:], time.perf_counter() - self._step_began]
        self._steps += 1
        self._next()

    def _next(self) -> None:
        if (self._steps + 1) % self._every == 0 and self._applied:
            begin = time.perf_counter()
            try:
                verdict = self._judge(self._ask)
            except _InCopy:
                return
            self.seconds.append(time.perf_counter() - begin)
            self.checked.append((self._steps + 1, verdict))
            self._say(verdict)
            if verdict.found == "different":
                self._differs(self, self._steps + 1, verdict)
        self._step_began = time.perf_counter()

    def _ask(self, ask: ShadowTask) -> Shadow | None:
        usual = statistics.median(self._step_seconds or [1.0]) * torch.get_num_threads()
        answer = copy_process(_SECONDS + _TIMES * usual)
        if isinstance(answer, Copy):
            self._become(answer, ask)
            raise _InCopy
        return None if answer is None else msgspec.json.decode(answer, type=Shadow)

    def _say(self, verdict: StepVerdict) -> None:
        share = sum(self.seconds) / max(time.perf_counter() - self._began, 1e-9)
        tell(
            f"step {self._steps + 1}: {verdict.reason} (checked in {self.seconds[-1]:.2f} s, {share:.1%} of "
            f"the run so far, and at most {verdict.bytes / 2**20:.0f} MiB besides)"
        )

    def _apply(self, name: str, root: nn.Module | torch.optim.Optimizer) -> None:
        if not self._plain:
            super()._apply(name, root)

    def take_back(self) -> None:
        """Revert the plan; there is nothing more to check."""
        self.revert()
        self.watcher.remove()

    # -- in a copy -------------------------------------------------------------------------------

    def _become(self, copy: Copy, ask: ShadowTask) -> None:
        """Be the copy from here to the end of the step."""
        self._copy, self._plain = copy, not ask.planned
        self.watcher.follow()
        sys.dont_write_bytecode = True
        torch.set_num_threads(1)
        if self._plain:
            self.revert()

        def keep(name: str, tensor: torch.Tensor) -> None:
            if name in ask.keep:
                self._ours = True
                keep_value(ask.folder / f"kept-{ask.keep.index(name)}", tensor)
                self._ours = False

        self._evidence = Evidence(self.modules, keep if ask.keep else None)
        sys.addaudithook(self._sees)
        writer = torch.serialization._open_zipfile_writer

        def opened(target: Any) -> Any:
            if isinstance(target, str | os.PathLike):
                self._outside(f"saves {target}")
            return writer(target)

        torch.serialization._open_zipfile_writer = opened  # type: ignore[assignment]

    def _sees(self, event: str, args: tuple[Any, ...]) -> None:
        """An audit event of Python: what would change something outside."""
        if self._ours:
            return
        if event == "open":
            path, _, flags = args
            writes = isinstance(flags, int) and flags & _WRITES
            if writes and not isinstance(path, int) and str(path) != os.devnull:
                self._outside(f"writes {path}")
        elif event in _EFFECTS:
            self._outside(f"calls {event}{args[:1]}")

    def _outside(self, what: str) -> NoReturn:
        """The step is over where it would touch what is outside, unless it is in the middle."""
        if self.watcher.would_end:
            self._finish()
        self._answer(Shadow(effect=what))

    def _finish(self) -> NoReturn:
        assert self._evidence is not None
        evidence, self._evidence = self._evidence, None
        with torch.no_grad(), torch.utils._python_dispatch._disable_current_modes():
            evidence.state(self.watcher.optimizers)
        self._answer(Shadow(step=evidence.step))

    def _answer(self, shadow: Shadow) -> NoReturn:
        assert self._copy is not None
        self._ours = True
        shadow.bytes = own_bytes()
        self._copy.answer(msgspec.json.encode(shadow))

    def ended(self, error: BaseException | None) -> None:
        """The script has ended, so or with an error; in a copy that is the end of the step."""
        if self._copy is None:
            super().ended(error)
            return
        if error is None or self.watcher.would_end:
            self._finish()
        said = "".join(traceback.format_exception_only(error)).strip()
        self._answer(Shadow(failed=said))

    def loader_asked(self, workers: int) -> None:
        if self._copy is None:
            return
        if self.watcher.would_end:
            self._finish()
        if workers:
            self._answer(
                Shadow(effect=f"takes a batch from {workers} processes in the middle of a step")
            )

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

    def update_starts(self, optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> None:
        self._look("update_starts", optimizer, parameter)

    def _look(self, told: str, *args: Any) -> None:
        if self._evidence is not None:
            with torch.utils._python_dispatch._disable_current_modes():
                getattr(self._evidence, told)(*args)


class _InCopy(Exception):
    """Raised in a copy to get out of what judges."""


_INSTEAD = "Leave it out, and compare some steps before: torchtrim verify SCRIPT --plan PLAN."


def _check_copies(root: nn.Module) -> None:
    """Raises `EndOfScript` where a step of this root cannot be run in a copy."""
    tensors = [*root.parameters(), *root.buffers()]
    elsewhere = [str(one.device) for one in tensors if one.device.type not in ("cpu", "meta")]
    why = ""
    if not can_copy():
        why = "which Linux alone can make"
    elif elsewhere:
        why = f"and what is on {elsewhere[0]} cannot be copied so"
    elif torch.distributed.is_available() and torch.distributed.is_initialized():
        why = "and one that talks with other ranks cannot be copied"
    if why:
        raise EndOfScript(
            Unsupported(f"--verify-every runs a step in a copy of the process, {why}. {_INSTEAD}")
        )


def tell(text: str) -> None:
    """Say something of the run's checks on stderr."""
    print(f"torchtrim: {text}", file=sys.stderr, flush=True)


_MAP_FIXED = 0x10
_PR_SET_PDEATHSIG = 1
_BLOCK = 1 << 16


class Copy(NamedTuple):
    """The copy's own view: the end of the pipe by which it answers."""

    pipe: int

    def answer(self, data: bytes) -> NoReturn:
        """Send the answer, and end at once: nothing of the script is closed or cleaned up."""
        view = memoryview(data)
        while view:
            view = view[os.write(self.pipe, view) :]
        os._exit(0)


def can_copy() -> bool:
    """Whether processes can be copied so here."""
    return sys.platform == "linux" and Path("/proc/self/fd").is_dir()


def copy_process(timeout: float) -> Copy | bytes | None:
    """In the copy its `Copy`; here, once it has ended, its answer: None if it died or took too long.

    Python seeds `random` anew in a copy; this one goes on with the numbers that come next here.
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
        return Copy(write)
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


def own_bytes() -> int:
    """At most so many bytes this copy had of its own at any time, in memory that it does not share."""
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
    for number in [int(one.name) for one in Path("/proc/self/fd").iterdir()]:
        if number not in (keep, nowhere):
            with suppress(OSError):
                _own_file(number, nowhere)
    for shared in list(_shared_maps()):
        _own_memory(libc, shared)


def _own_file(number: int, nowhere: int) -> None:
    """A file that is read is opened anew, where it is read now; all else that holds data leads nowhere."""
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
    """A shared mapping for writing: `file` is empty where it has no name that can be opened."""

    start: int
    size: int
    offset: int
    file: str


def _shared_maps() -> Iterator[_SharedMapping]:
    """Batches of a loader's workers, semaphores, arrays in files."""
    with Path("/proc/self/maps").open() as file:
        for line in file:
            span, rights, offset, _, _, *name = line.split(maxsplit=5)
            if rights.startswith("rw") and rights[3] == "s":
                start, _, end = span.partition("-")
                size = int(end, 16) - int(start, 16)
                path = name[0].rstrip("\n") if name else ""
                named = path.startswith("/") and not path.startswith("/dev/")
                yield _SharedMapping(
                    int(start, 16),
                    size,
                    int(offset, 16),
                    path if named and Path(path).is_file() else "",
                )


def _own_memory(libc: ctypes.CDLL, shared: _SharedMapping) -> None:
    """Put memory of this process alone in the place of a shared mapping, with the same in it."""
    place = libc.mmap
    place.restype = ctypes.c_void_p
    place.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    at = shared.start, shared.size, mmap.PROT_READ | mmap.PROT_WRITE
    if shared.file:
        file = os.open(shared.file, os.O_RDONLY)
        place(*at, mmap.MAP_PRIVATE | _MAP_FIXED, file, shared.offset)
        os.close(file)
        return
    kept = ctypes.string_at(shared.start, shared.size)
    if place(*at, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED, -1, 0) == shared.start:
        ctypes.memmove(shared.start, kept, shared.size)
