"""A copy of this process whose doings no one sees: what it writes, sends or takes stays in it.

Linux: shared mappings become its own, files it reads have an offset of their own, and what it
would write to, sockets and pipes too, leads nowhere.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import random
import select
import signal
import stat
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, NoReturn

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
