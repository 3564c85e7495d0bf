"""Parts that fail alone: a technique, rule, fix or renderer with a defect costs only itself."""

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
    "This is a bug of torchtrim. Please report it where you got torchtrim from, with the command, this "
    f"message and what `torchtrim doctor` prints; {DEBUG}=1 shows the traceback."
)
_MOST_CHARACTERS = 400  # Arbitrary; an error message of a few lines.
Kind = Literal["technique", "rule", "fix", "renderer"]
KINDS: tuple[Kind, ...] = get_args(Kind)


class Failure(NamedTuple):
    """A part with a defect, and the exception that it raised."""

    kind: Kind
    name: str
    error: str

    def __str__(self) -> str:
        return f"{self.kind} {self.name} failed and was left out: {self.error}"


_known: dict[tuple[Kind, str], Failure] = {}
_collectors: list[list[Failure]] = []


class Isolated:
    """Runs a part: what it raises beyond torchtrim's own errors is noted, and goes no further."""

    def __init__(self, kind: Kind, name: str, passes: tuple[type[Exception], ...] = ()) -> None:
        self._part: tuple[Kind, str] = kind, name
        self._passing = passes

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception) or isinstance(error, self._passing) or _passes(error):
            return False
        note(Failure(*self._part, said_of(error)))
        return True


def isolated(kind: Kind, name: str, passes: tuple[type[Exception], ...] = ()) -> Isolated:
    """Return a context in which a part runs, and that ends quietly where the part raises.

    Errors for people, those named, exhausted memory and a closed pipe pass through; with TORCHTRIM_DEBUG=1
    everything does.
    """
    return Isolated(kind, name, passes)


def debugging() -> bool:
    """Whether defects are to be raised, not survived."""
    return os.environ.get(DEBUG, "") not in ("", "0")


def said_of(error: BaseException) -> str:
    """The exception in one line, of a bounded length."""
    text = " ".join(str(error)[:_MOST_CHARACTERS].split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def trace_of(error: BaseException) -> str:
    """The traceback on lines of its own, with TORCHTRIM_DEBUG=1; else nothing."""
    return "\n" + "".join(format_exception(error)).rstrip() if debugging() else ""


def note(failure: Failure) -> None:
    """Remember a failure, and tell of the first of each part on stderr; or hand it to who collects them."""
    if _collectors:
        _collectors[-1].append(failure)
    elif failure[:2] not in _known:
        _known[failure[:2]] = failure
        with suppress(OSError, ValueError):
            said = f"error: {failure}. {TO_REPORT}"
            print("".join(c if c.isprintable() else "?" for c in said), file=sys.stderr, flush=True)


@contextmanager
def collected() -> Iterator[list[Failure]]:
    """The failures of this block, for the caller to note: in another process, or each time anew."""
    found: list[Failure] = []
    _collectors.append(found)
    try:
        yield found
    finally:
        _collectors.pop()


def failures(kind: Kind) -> tuple[Failure, ...]:
    """The failures of parts of that kind since `forget`."""
    return tuple(one for one in _known.values() if one.kind == kind)


def forget() -> None:
    """Begin anew: a verb answers for its own failures."""
    _known.clear()


def _passes(error: Exception) -> bool:
    ours = isinstance(error, (TorchtrimError, BrokenPipeError))
    return ours or is_out_of_memory(error) or debugging()
