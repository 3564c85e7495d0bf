"""Where a process is that does not go on: its main thread's stack, as the process itself writes it."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
import time
from collections.abc import Sequence
from pathlib import Path

STACK = "stack"
_SIGNAL = getattr(signal, "SIGUSR1", None)
_SECONDS = 2.0
_LINE = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.MULTILINE)


def tells_where(folder: Path) -> None:
    """Have this process write its stacks into the folder when it is asked."""
    if _SIGNAL is not None:
        faulthandler.register(_SIGNAL, file=(folder / STACK).open("w"), all_threads=True)


def asked_where(processes: Sequence[tuple[int, Path]]) -> list[tuple[str, ...]]:
    """The lines at which processes' main threads are, innermost first, as `"path:line in function"`.

    Empty for one that does not tell within two seconds.
    """
    for pid, path in processes:
        if _SIGNAL is not None and path.exists():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, _SIGNAL)
    deadline = time.monotonic() + _SECONDS
    while time.monotonic() < deadline and not all(_written(path) for _, path in processes):
        time.sleep(_SECONDS / 40)
    return [_main_thread(path) for _, path in processes]


def _written(path: Path) -> bool:
    return not path.exists() or path.stat().st_size > 0


def _main_thread(path: Path) -> tuple[str, ...]:
    """The last thread that is listed is the one that was there first."""
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return ()
    last = re.split(r"^(?:Current t|T)hread .*$", text, flags=re.MULTILINE)[-1]
    return tuple(f"{file}:{line} in {function}" for file, line, function in _LINE.findall(last))
