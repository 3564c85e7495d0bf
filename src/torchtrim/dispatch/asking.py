"""Whether torch is asked by torchtrim now, so that what it looks at concerns nobody's program."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

_ASKING = ContextVar("asking", default=False)


@contextlib.contextmanager
def asking() -> Iterator[None]:
    """A question of torchtrim's own."""
    token = _ASKING.set(True)
    try:
        yield
    finally:
        _ASKING.reset(token)


def is_asking() -> bool:
    """Whether there is one."""
    return _ASKING.get()
