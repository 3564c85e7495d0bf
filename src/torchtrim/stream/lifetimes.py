"""Lifetimes of a state's entries, declared per field."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torchtrim.errors import UsageError


@dataclass(frozen=True, slots=True)
class Lifetime:
    """The lifetime of a field's entries, created by the functions of this module.

    `kind` is one of `persistent`, `pinned`, `window`, `until_read`, `volatile`. `frames` is the largest
    distance of the stream from the entry's frame, in either direction, or `None` for any distance. `reads`
    is the number of reads after which an entry is evicted.
    """

    kind: str
    frames: int | None = None
    reads: int | None = None

    @property
    def evictable(self) -> bool:
        """True if a budget may evict entries of this field. Entries of any field may be spilled."""
        return self.kind not in ("persistent", "pinned")

    def __str__(self) -> str:
        if self.kind == "window":
            return f"window({self.frames})"
        if self.kind == "until_read":
            within = "" if self.frames is None else f", within={self.frames}"
            return f"until_read({self.reads}{within})"
        return self.kind


def persistent() -> Lifetime:
    """Never evicted and shared by all streams of a model: parameters, rotary tables, position encodings."""
    return Lifetime("persistent")


def pinned() -> Lifetime:
    """Kept until deleted or until the stream is reset: conditioning frames, prompts."""
    return Lifetime("pinned")


def window(frames: int) -> Lifetime:
    """Kept while the stream is at most `frames` frames away from the entry's frame, in either direction.

    With `window(15)`, frame 20 can read the entries of frames 5 to 35. Raises `UsageError` below 0.
    """
    return Lifetime("window", frames=_count(frames, "window", 0))


def until_read(reads: int = 1, *, within: int | None = None) -> Lifetime:
    """Evicted after `reads` reads, or when `window(within)` ends if `within` is given.

    Without `within`, an entry that is never read stays forever. Raises `UsageError` for `reads` below 1 or
    `within` below 0.
    """
    frames = None if within is None else _count(within, "until_read", 0)
    return Lifetime("until_read", frames=frames, reads=_count(reads, "until_read", 1))


def volatile() -> Lifetime:
    """Evicted at the end of the frame that wrote it: images, returned masks."""
    return Lifetime("volatile")


def _count(number: int, who: str, least: int) -> int:
    if isinstance(number, bool) or not isinstance(number, int) or number < least:
        raise UsageError(
            f"{who}({number!r}): pass an integer of {least} or more, such as {who}(15)."
        )
    return number


_switch = [False]
bounded: set[str] = set()
"""Class names of the bounded state in this process; a few, for any number of streams."""


@contextmanager
def unbounded() -> Iterator[None]:
    """Disable all bounds inside the block."""
    before, _switch[0] = _switch[0], True
    try:
        yield
    finally:
        _switch[0] = before


def is_unbounded() -> bool:
    """True inside `unbounded()`."""
    return _switch[0]
