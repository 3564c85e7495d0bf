"""Run a stream with lifetimes on its state, beside the same stream without, and see where results part."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from torchtrim.errors import UsageError
from torchtrim.stream.lifetimes import Lifetime
from torchtrim.stream.paths import Path, holder_of, pattern_of, put, tensors_in
from torchtrim.stream.state_bytes import state_bytes
from torchtrim.stream.storages import storage_id, tensors_of

Run = Callable[[Any], Iterator[Any]]
_MISSING = object()


@dataclass(frozen=True, slots=True)
class Trial:
    """How a stream with lifetimes compares with the stream without.

    `differs_from` is the first frame, counted from 0, whose result is not equal to the bit; `None` if all
    are. `difference` is the largest there. `failed` is the error that ended the bounded run. `varies` says
    whether results of the unbounded run differ from frame to frame; if not, equality says nothing.
    `bytes` and `unbounded_bytes` are what the states held after the last frame.
    """

    frames: int
    differs_from: int | None
    difference: float
    failed: str | None
    varies: bool
    bytes: int
    unbounded_bytes: int

    @property
    def accepted(self) -> bool:
        """Whether every result was equal, and that says something."""
        return self.differs_from is None and self.failed is None and self.varies

    def __str__(self) -> str:
        sizes = f"{self.bytes} of {self.unbounded_bytes} bytes held after {self.frames} frames"
        if self.failed is not None:
            return f"rejected at frame {self.differs_from}: {self.failed}"
        if self.differs_from is not None:
            return f"rejected: results differ from frame {self.differs_from} on, by {self.difference:.3g}"
        if not self.varies:
            return "undecided: the unbounded run gives the same result in most frames, so any policy passes"
        return f"accepted: results equal to the bit, {sizes}"


def try_lifetimes(
    model: Any, run: Run, lifetimes: Mapping[str, Lifetime], frames: int = 40
) -> Trial:
    """Compare a stream whose state is cut down to the lifetimes with one whose state is not.

    `run` is as for `learn_state`. A pattern that names tensors empties them: their containers keep their
    entries. A pattern that names a whole record, such as `outputs.*`, deletes the record. `window(n)` keeps
    what is read up to n frames later. Raises `UsageError` if the unbounded run is not the same twice.
    """
    free, kept = _collect(model, run, {}, frames)
    tied, left, failed = [], 0, None
    state, steps = steps_of(model, run)
    cutter = Cutter(state, lifetimes)
    try:
        for step, result in zip(range(frames), steps, strict=False):
            tied.append(_copied(result))
            cutter.end_step(step)
        left = state_bytes(state)
    except Exception as error:
        failed = f"{type(error).__name__}: {error}"
    first = next(
        (n for n, (a, b) in enumerate(zip(free, tied, strict=False)) if not _equal(a, b)), None
    )
    difference = 0.0 if first is None else _difference(free[first], tied[first])
    if failed is not None:
        first = len(tied) if first is None else first
    if first is not None and not _same(free, _collect(model, run, {}, frames)[0]):
        raise UsageError(
            "two unbounded runs gave different results, so a bounded one cannot be compared. Seed the "
            "generators and make the model and its inputs anew inside run()."
        )
    return Trial(frames, first, difference, failed, _vary(free), left, kept)


def steps_of(model: Any, run: Run) -> tuple[Any, Iterator[Any]]:
    """What holds the state of a run, and its results frame by frame."""
    steps = iter(run(model))
    state = next(steps, _MISSING)
    if state is _MISSING or isinstance(state, torch.Tensor):
        raise UsageError(
            "run(model) must first yield what holds the state, then a result after each frame: "
            "yield session; for image in images: yield model(session, image)."
        )
    return state, steps


class Cutter:
    """Keeps a state of any shape within lifetimes, by patterns of where its fields lie."""

    def __init__(self, state: Any, lifetimes: Mapping[str, Lifetime]) -> None:
        self._state = state
        self._lifetimes = lifetimes
        self._written: dict[Path, tuple[int, int]] = {}

    def end_step(self, step: int) -> None:
        """A frame is done: what its lifetime does not hold is emptied, or its record deleted."""
        written = {}
        for path, tensor in list(tensors_in(self._state)):
            if not tensor.numel():
                continue
            storage = storage_id(tensor)
            old = self._written.get(path)
            since = old[0] if old is not None and old[1] == storage else step
            for cut, lifetime in self._matching(path):
                if _is_over(lifetime, step + 1 - since):
                    self._cut(path, cut)
                    break
            else:
                written[path] = (since, storage)
        self._written = written

    def _matching(self, path: Path) -> Iterator[tuple[Path, Lifetime]]:
        for length in range(1, len(path) + 1):
            lifetime = self._lifetimes.get(pattern_of(path[:length]))
            if lifetime is not None:
                yield path[:length], lifetime

    def _cut(self, path: Path, cut: Path) -> None:
        holder = holder_of(self._state, cut)
        if holder is None:
            return
        if cut != path and isinstance(holder, dict):
            holder.pop(cut[-1], None)
        elif cut == path:
            put(holder, cut[-1], torch.empty(0))


def _is_over(lifetime: Lifetime, age: int) -> bool:
    if lifetime.kind == "volatile":
        return True
    return lifetime.frames is not None and age > lifetime.frames


def _collect(
    model: Any, run: Run, lifetimes: Mapping[str, Lifetime], frames: int
) -> tuple[list[list[torch.Tensor]], int]:
    state, steps = steps_of(model, run)
    results = [_copied(result) for _, result in zip(range(frames), steps, strict=False)]
    return results, state_bytes(state)


def _copied(result: Any) -> list[torch.Tensor]:
    return [tensor.detach().cpu().clone() for tensor in tensors_of(result)]


def _equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    if len(one) != len(other):
        return False
    pairs = list(zip(one, other, strict=True))
    return all(a.shape == b.shape and _bits_equal(a, b) for a, b in pairs)


def _bits_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one, other) or bool(
        ((one == other) | ((one != one) & (other != other))).all()
    )


def _difference(one: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    pairs = [(a, b) for a, b in zip(one, other, strict=False) if a.shape == b.shape and a.numel()]
    return max(
        (float((a.double() - b.double()).abs().max()) for a, b in pairs), default=float("inf")
    )


def _same(one: list[list[torch.Tensor]], other: list[list[torch.Tensor]]) -> bool:
    return len(one) == len(other) and all(_equal(a, b) for a, b in zip(one, other, strict=True))


def _vary(results: list[list[torch.Tensor]]) -> bool:
    pairs = list(itertools.pairwise(results))
    return sum(not _equal(a, b) for a, b in pairs) > len(pairs) // 2
