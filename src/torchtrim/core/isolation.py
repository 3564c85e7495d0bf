"""Isolation of technique, rule, fix and renderer failures: a defect in one disables only that one."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from traceback import format_exception
from types import TracebackType
from typing import Literal, NamedTuple, get_args

from torchtrim.errors import TorchtrimError, is_out_of_memory

DEBUG = "TORCHTRIM_DEBUG"
TO_REPORT = (
    "This is a bug in torchtrim. Please report it where you got torchtrim from, with "
    f"the command, this message and the output of `torchtrim doctor`. {DEBUG}=1 shows "
    "the traceback."
)
_MOST_CHARACTERS = 400  # Arbitrary; an error message of a few lines.
Kind = Literal["technique", "rule", "fix", "renderer"]
KINDS: tuple[Kind, ...] = get_args(Kind)


class Failure(NamedTuple):
    """A part that raised an exception, with its message."""

    kind: Kind
    name: str
    error: str

    def __str__(self) -> str:
        return f"{self.kind} {self.name} failed and was left out: {self.error}"


_known: dict[tuple[Kind, str], Failure] = {}
_collectors: list[list[Failure]] = []


class isolated:  # noqa: N801, since it is used like a function, as `contextlib.suppress` is
    """A context that runs a part, and records and suppresses the exceptions that it raises.

    `TorchtrimError`, the types in `passes`, out-of-memory errors and broken pipes propagate. With
    TORCHTRIM_DEBUG=1 everything does.
    """

    def __init__(self, kind: Kind, name: str, passes: tuple[type[Exception], ...] = ()) -> None:
        self._part: tuple[Kind, str] = kind, name
        self._passing = passes

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> bool:
        ours = (TorchtrimError, BrokenPipeError)
        if not isinstance(error, Exception) or isinstance(error, ours + self._passing):
            return False
        if is_out_of_memory(error) or debugging():
            return False
        note(Failure(*self._part, said_of(error)))
        return True


def debugging() -> bool:
    """Return True if TORCHTRIM_DEBUG is set, so that defects are raised."""
    return os.environ.get(DEBUG, "") not in ("", "0")


def said_of(error: BaseException) -> str:
    """Return the exception on one line of bounded length."""
    text = " ".join(str(error)[:_MOST_CHARACTERS].split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def trace_of(error: BaseException) -> str:
    """Return the traceback, preceded by a newline, with TORCHTRIM_DEBUG=1; otherwise ""."""
    return "\n" + "".join(format_exception(error)).rstrip() if debugging() else ""


def note(failure: Failure) -> None:
    """Print the first failure of each part to stderr, or append it to the innermost collector."""
    if _collectors:
        _collectors[-1].append(failure)
    elif failure[:2] not in _known:
        _known[failure[:2]] = failure
        with suppress(OSError, ValueError):
            text = f"error: {failure}. {TO_REPORT}"
            print("".join(c if c.isprintable() else "?" for c in text), file=sys.stderr, flush=True)


@contextmanager
def collected() -> Iterator[list[Failure]]:
    """Collect the failures of this block for the caller to record."""
    collector: list[Failure] = []
    _collectors.append(collector)
    try:
        yield collector
    finally:
        _collectors.pop()


def failures(kind: Kind) -> tuple[Failure, ...]:
    """Return the failures of parts of this kind since the last `forget`."""
    return tuple(failure for failure in _known.values() if failure.kind == kind)


def forget() -> None:
    """Clear the recorded failures, as each verb does at its start."""
    _known.clear()
