"""Plans number the operators of a call as the program itself runs them.

A technique that runs a module part by part, or looks first at how it behaves, runs more of them. Those have
no number, so that a plan's names mean the same operators whatever other techniques it holds.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from functools import partial

AsBefore = Callable[[bool], contextlib.AbstractContextManager[None]]


class _Thread(threading.local):
    numbered = True


_thread = _Thread()


def is_numbered() -> bool:
    """Whether the operators that run now are the program's own."""
    return _thread.numbered


@contextlib.contextmanager
def unnumbered() -> Iterator[AsBefore]:
    """Operators of a technique. Gives a context in which they are numbered as before, if it is told so."""
    before = _thread.numbered
    with _set(False):
        yield partial(_as_before, before)


def _as_before(before: bool, own: bool) -> contextlib.AbstractContextManager[None]:
    return _set(before and own)


@contextlib.contextmanager
def _set(numbered: bool) -> Iterator[None]:
    before, _thread.numbered = _thread.numbered, numbered
    try:
        yield
    finally:
        _thread.numbered = before
