"""Learn the lifetimes of a state's fields from how long after writing they are read, and test lifetimes.

A dispatch mode records the storages that each operator reads (views excepted) while a stream runs, so the
containers that hold the state do not matter.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from torchtrim.errors import UsageError
from torchtrim.stream.lifetimes import Lifetime, persistent, pinned, volatile, window
from torchtrim.stream.storages import (
    Path,
    holder_of,
    pattern_of,
    put,
    state_bytes,
    storage_id,
    tensors_in,
    tensors_of,
)

Run = Callable[[Any], Iterator[Any]]
_MISSING = object()


@dataclass(frozen=True, slots=True)
class Trial:
    """Comparison of a stream with lifetimes to the same stream without.

    `differs_from` is the first frame, counted from 0, whose result is not identical bit for bit, or `None`.
    `difference` is the largest difference in that frame. `failed` is the error that ended the bounded run.
    `varies` is true if results of the unbounded run differ from frame to frame; if not, equality proves
    nothing. `bytes` and `unbounded_bytes` are the sizes of the two states after the last frame.
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
        """True if all results were equal and the unbounded results vary."""
        return self.differs_from is None and self.failed is None and self.varies

    def __str__(self) -> str:
        sizes = f"{self.bytes} of {self.unbounded_bytes} bytes held after {self.frames} frames"
        if self.failed is not None:
            return f"rejected at frame {self.differs_from}: {self.failed}"
        if self.differs_from is not None:
            return f"rejected: results differ from frame {self.differs_from} on, by {self.difference:.3g}"
        if not self.varies:
            return "undecided: the unbounded run gives the same result in most frames, so any policy passes"
        return f"accepted: results identical bit for bit, {sizes}"


def try_lifetimes(
    model: Any, run: Run, lifetimes: Mapping[str, Lifetime], frames: int = 40
) -> Trial:
    """Compare a stream bounded by lifetimes with the unbounded stream.

    `run` is the same as for `learn_state`. A pattern that names tensors empties them; their containers keep
    the entries. A pattern that names a whole record, such as `outputs.*`, deletes the record. `window(n)`
    keeps entries that are read up to n frames later. Raises `UsageError` if two unbounded runs differ.
    """
    free, unbounded_bytes = _collect(model, run, frames)
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
    if failed is not None and first is None:
        first = len(tied)
    if first is not None and not _same(free, _collect(model, run, frames)[0]):
        raise UsageError(
            "two unbounded runs gave different results, so a bounded run cannot be compared. Seed the "
            "generators, and create the model and its inputs inside run()."
        )
    return Trial(frames, first, difference, failed, _vary(free), left, unbounded_bytes)


def steps_of(model: Any, run: Run) -> tuple[Any, Iterator[Any]]:
    """Start a run: return the object that holds its state, and an iterator over its results per frame."""
    steps = iter(run(model))
    state = next(steps, _MISSING)
    if state is _MISSING or isinstance(state, torch.Tensor):
        raise UsageError(
            "run(model) must first yield the object that holds the state, then a result after each frame: "
            "yield session; for image in images: yield model(session, image)."
        )
    return state, steps


class Cutter:
    """Applies lifetimes to a state of any structure, by patterns of paths to its fields."""

    def __init__(self, state: Any, lifetimes: Mapping[str, Lifetime]) -> None:
        self._state = state
        self._lifetimes = lifetimes
        self._written: dict[Path, tuple[int, int]] = {}

    def end_step(self, step: int) -> None:
        """End a frame: empty the tensors whose lifetime is over, or delete their records."""
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
    expired = lifetime.frames is not None and age > lifetime.frames
    return lifetime.kind == "volatile" or expired


def _collect(model: Any, run: Run, frames: int) -> tuple[list[list[torch.Tensor]], int]:
    state, steps = steps_of(model, run)
    results = [_copied(result) for _, result in zip(range(frames), steps, strict=False)]
    return results, state_bytes(state)


def _copied(result: Any) -> list[torch.Tensor]:
    return [tensor.detach().cpu().clone() for tensor in tensors_of(result)]


def _equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(
        a.shape == b.shape and (torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all()))
        for a, b in zip(one, other, strict=True)
    )


def _difference(one: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    pairs = [(a, b) for a, b in zip(one, other, strict=False) if a.shape == b.shape and a.numel()]
    return max(
        (float((a.double() - b.double()).abs().max()) for a, b in pairs), default=float("inf")
    )


def _same(one: list[list[torch.Tensor]], other: list[list[torch.Tensor]]) -> bool:
    return len(one) == len(other) and all(map(_equal, one, other))


def _vary(results: list[list[torch.Tensor]]) -> bool:
    pairs = list(itertools.pairwise(results))
    return sum(not _equal(a, b) for a, b in pairs) > len(pairs) // 2


@dataclass(frozen=True, slots=True)
class Observed:
    """Observations of the fields that match a pattern.

    `written` counts writes. `oldest_read` is the largest number of frames between write and read, or `None`
    if no operator read such a field, not even in its own frame. `bytes` is the size of the largest entry.
    """

    pattern: str
    lifetime: Lifetime
    why: str
    written: int
    oldest_read: int | None
    bytes: int


@dataclass(frozen=True, slots=True)
class Learnt:
    """Fields with the lifetimes that a run suggests. `trial` compares a second run that uses them."""

    frames: int
    fields: tuple[Observed, ...]
    trial: Trial | None = None

    def lifetimes(self) -> dict[str, Lifetime]:
        """Return the lifetimes by pattern, ready for `try_lifetimes`."""
        return {one.pattern: one.lifetime for one in self.fields}

    def __str__(self) -> str:
        rows = [(one.pattern, str(one.lifetime), f"{one.bytes} B", one.why) for one in self.fields]
        widths = [max((len(row[column]) for row in rows), default=0) for column in range(3)]
        lines = ["  ".join([*map(str.ljust, row, widths), row[3]]) for row in rows]
        return "\n".join([f"{self.frames} frames watched", *lines, str(self.trial or "not tried")])


def learn_state(model: Any, run: Run, frames: int = 40, *, check: bool = True) -> Learnt:
    """Watch a stream for some frames and propose a lifetime for each field of its state.

    `run(model)` is a generator: it first yields the object that holds the state (or a dict or list of them),
    then the result of each frame. It must be deterministic. A field's name is its path, where `*` matches
    any number: `output_dict_per_obj.*.non_cond_frame_outputs.*.object_pointer`. With `check`, the stream
    runs twice more, unbounded and with the lifetimes, and the results are compared.

    A window is proven long enough only for this run, so the run should contain whatever your streams
    contain, such as prompts. Raises `UsageError` for fewer than 8 frames or a run that ends early.
    """
    if frames < 8:
        raise UsageError(
            f"frames={frames}: finding a lifetime takes at least 8 frames; 40 is usual."
        )
    watched = _WatchedDict()
    state, steps = steps_of(model, run)
    for step in range(frames):
        with _Reads() as reads:
            ended = next(steps, steps) is steps
        if ended:
            raise UsageError(f"the run ended after {step} of {frames} requested frames.")
        watched.end_step(step, state, reads.storages)
    learnt = Learnt(frames, watched.fields(frames))
    if not check:
        return learnt
    return Learnt(frames, learnt.fields, try_lifetimes(model, run, learnt.lifetimes(), frames))


class _Reads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not any(one.alias_info and not one.alias_info.is_write for one in func._schema.returns):
            inputs = {storage_id(tensor) for tensor in tensors_of([*args, kwargs or {}])}
            self.storages -= {storage_id(tensor) for tensor in tensors_of(out)}
            self.storages |= inputs
        return out


@dataclass(slots=True)
class _WrittenEntry:
    written: int
    tensor: torch.Tensor
    read: int | None = None


class _WatchedDict:
    """Every tensor that was ever in the state, with the steps of its write and its last read."""

    def __init__(self) -> None:
        self._now: dict[Path, _WrittenEntry] = {}
        self._patterns: defaultdict[str, list[_WrittenEntry]] = defaultdict(list)
        self._storages: defaultdict[int, list[_WrittenEntry]] = defaultdict(list)

    def end_step(self, step: int, state: Any, read: set[int]) -> None:
        present = dict(tensors_in(state))
        for path, tensor in present.items():
            old = self._now.get(path)
            if old is None or storage_id(old.tensor) != storage_id(tensor):
                entry = self._now[path] = _WrittenEntry(step, tensor)
                self._patterns[pattern_of(path)].append(entry)
                self._storages[storage_id(tensor)].append(entry)
        self._now = {path: self._now[path] for path in present}
        for storage in read:
            for entry in self._storages.get(storage, ()):
                entry.read = step

    def fields(self, frames: int) -> tuple[Observed, ...]:
        fields = []
        for pattern, entries in sorted(self._patterns.items()):
            ages = [entry.read - entry.written for entry in entries if entry.read is not None]
            oldest = max(ages, default=None)
            most = max(entry.tensor.untyped_storage().nbytes() for entry in entries)
            lifetime, why = _lifetime(entries, oldest, frames)
            fields.append(Observed(pattern, lifetime, why, len(entries), oldest, most))
        return tuple(fields)


def _lifetime(
    entries: list[_WrittenEntry], oldest: int | None, frames: int
) -> tuple[Lifetime, str]:
    storages = {storage_id(entry.tensor) for entry in entries}
    if len(storages) == 1 and len({entry.written for entry in entries}) > 1:
        return persistent(), "always the same storage"
    if oldest is None:
        return volatile(), "no operator read it"
    if oldest == 0:
        return volatile(), "read only in its own frame"
    early = [entry for entry in entries if entry.written < frames // 4]
    if any((entry.read or 0) >= 3 * frames // 4 for entry in early):
        return pinned(), "written early and read to the end"
    return window(oldest), f"read up to {oldest} frames later"
