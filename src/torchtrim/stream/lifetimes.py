"""How long an entry of a stream's state is needed, declared for a field and not for a frame."""

from __future__ import annotations

from dataclasses import dataclass

from torchtrim.errors import UsageError


@dataclass(frozen=True, slots=True)
class Lifetime:
    """What may happen to the entries of a field.

    `kind` is one of `persistent`, `pinned`, `window`, `until_read`, `volatile`. `frames` is how far
    the stream may be from an entry's frame, in frames either way; `None` is any distance. `reads` is
    after how many reads an entry goes. Made by the functions of this file.
    """

    kind: str
    frames: int | None = None
    reads: int | None = None

    @property
    def evictable(self) -> bool:
        """Whether a budget may take entries of this field out of the state; any may be spilled."""
        return self.kind not in ("persistent", "pinned")

    def __str__(self) -> str:
        if self.kind == "window":
            return f"window({self.frames})"
        if self.kind == "until_read":
            within = "" if self.frames is None else f", within={self.frames}"
            return f"until_read({self.reads}{within})"
        return self.kind


def persistent() -> Lifetime:
    """Parameters, rotary tables, position encodings: shared by all streams of a model, never evicted."""
    return Lifetime("persistent")


def pinned() -> Lifetime:
    """Kept by this stream until it is deleted or reset: conditioning frames, prompts."""
    return Lifetime("pinned")


def window(frames: int) -> Lifetime:
    """Readable while the stream is at most `frames` frames from the entry's own, either way.

    `window(15)`: at frame 20 the entries of frames 5 to 35 are there. Raises `UsageError` below 0.
    """
    return Lifetime("window", frames=_count(frames, "window", 0))


def until_read(reads: int = 1, *, within: int | None = None) -> Lifetime:
    """Gone after `reads` reads, and where `within` is given no later than `window(within)`.

    Without `within` an entry that nobody reads stays for ever. Raises `UsageError` for `reads` below
    1 or `within` below 0.
    """
    frames = None if within is None else _count(within, "until_read", 0)
    return Lifetime("until_read", frames=frames, reads=_count(reads, "until_read", 1))


def volatile() -> Lifetime:
    """Gone when the frame ends in which it was written: images, masks that were handed out."""
    return Lifetime("volatile")


def _count(number: int, who: str, least: int) -> int:
    if isinstance(number, bool) or not isinstance(number, int) or number < least:
        raise UsageError(
            f"{who}({number!r}): give a whole number of {least} or more, such as {who}(15)."
        )
    return number
