"""Find the lifetimes of a state's fields by watching which of them are read how long after they were written.

Reads are those of operators: while a stream runs, a dispatch mode sees the storages that each operator
takes in, views aside, so it does not matter in which containers the state is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from torchtrim.errors import UsageError
from torchtrim.stream.lifetimes import Lifetime, persistent, pinned, volatile, window
from torchtrim.stream.paths import Path, pattern_of, tensors_in
from torchtrim.stream.storages import storage_id, tensors_of
from torchtrim.stream.trial import Run, Trial, steps_of, try_lifetimes


@dataclass(frozen=True, slots=True)
class Observed:
    """What was seen of the fields of a pattern.

    `written` is how often one was written, `oldest_read` the most frames after which one was read, `None`
    if no operator read one, not even in its own frame. `bytes` is what an entry holds at most.
    """

    pattern: str
    lifetime: Lifetime
    why: str
    written: int
    oldest_read: int | None
    bytes: int


@dataclass(frozen=True, slots=True)
class Learnt:
    """Fields with the lifetimes that a run suggests; `trial` is a second run with these lifetimes."""

    frames: int
    fields: tuple[Observed, ...]
    trial: Trial | None = None

    def lifetimes(self) -> dict[str, Lifetime]:
        """The lifetimes by pattern, as `try_lifetimes` takes them."""
        return {one.pattern: one.lifetime for one in self.fields}

    def __str__(self) -> str:
        rows = [(one.pattern, str(one.lifetime), f"{one.bytes} B", one.why) for one in self.fields]
        widths = [max((len(row[column]) for row in rows), default=0) for column in range(3)]
        lines = [
            "  ".join(
                [*(word.ljust(width) for word, width in zip(row, widths, strict=False)), row[3]]
            )
            for row in rows
        ]
        return "\n".join([f"{self.frames} frames watched", *lines, str(self.trial or "not tried")])


def learn_state(model: Any, run: Run, frames: int = 40, *, check: bool = True) -> Learnt:
    """Watch a stream for some frames and propose a lifetime for each field of its state.

    `run(model)` is a generator: it first yields what holds the state (an object, dict or list of them),
    then after each frame what the frame computed. It must do the same each time. Fields are named by
    where they are: `output_dict_per_obj.*.non_cond_frame_outputs.*.object_pointer`, `*` for any number.
    With `check` the stream runs twice more, as it is and with the lifetimes, and results are compared.

    A window is known to be long enough only for what the run does: let it contain what your streams
    contain, such as prompts. Raises `UsageError` for fewer than 8 frames, or a run that ends before.
    """
    if frames < 8:
        raise UsageError(f"frames={frames}: a lifetime shows in 8 frames or more; 40 are usual.")
    watched = _WatchedDict()
    state, steps = steps_of(model, run)
    for step in range(frames):
        with _Reads() as reads:
            ended = next(steps, steps) is steps
        if ended:
            raise UsageError(f"the run ended after {step} frames, and {frames} were asked for.")
        watched.end_step(step, state, reads.storages)
    learnt = Learnt(frames, tuple(watched.judged(frames)))
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


@dataclass(slots=True)
class _Field:
    entries: list[_WrittenEntry] = field(default_factory=list)
    present: int = 0


class _WatchedDict:
    """Every tensor that ever was in the state, when it came and when an operator last read it."""

    def __init__(self) -> None:
        self._now: dict[Path, _WrittenEntry] = {}
        self._fields: dict[str, _Field] = {}
        self._lying: dict[int, list[_WrittenEntry]] = {}

    def end_step(self, step: int, state: Any, read: set[int]) -> None:
        present = dict(tensors_in(state))
        for path, tensor in present.items():
            old = self._now.get(path)
            if old is None or storage_id(old.tensor) != storage_id(tensor):
                self._add(path, _WrittenEntry(step, tensor))
        self._now = {path: self._now[path] for path in present}
        for storage in read:
            for entry in self._lying.get(storage, ()):
                entry.read = step

    def judged(self, frames: int) -> Iterator[Observed]:
        for pattern, found in sorted(self._fields.items()):
            yield self._judge(pattern, found, frames)

    def _add(self, path: Path, entry: _WrittenEntry) -> None:
        self._now[path] = entry
        self._fields.setdefault(pattern_of(path), _Field()).entries.append(entry)
        self._lying.setdefault(storage_id(entry.tensor), []).append(entry)

    def _judge(self, pattern: str, found: _Field, frames: int) -> Observed:
        entries = found.entries
        ages = [entry.read - entry.written for entry in entries if entry.read is not None]
        oldest = max(ages, default=None)
        lifetime, why = self._lifetime(entries, oldest, frames)
        most = max(entry.tensor.untyped_storage().nbytes() for entry in entries)
        return Observed(pattern, lifetime, why, len(entries), oldest, most)

    def _lifetime(
        self, entries: list[_WrittenEntry], oldest: int | None, frames: int
    ) -> tuple[Lifetime, str]:
        storages = {storage_id(entry.tensor) for entry in entries}
        frames_written = {entry.written for entry in entries}
        if len(storages) == 1 and len(frames_written) > 1:
            return persistent(), "always the same storage"
        if oldest is None:
            return volatile(), "no operator read it"
        if oldest == 0:
            return volatile(), "read only in its own frame"
        early = [entry for entry in entries if entry.written < frames // 4]
        if any((entry.read or 0) >= 3 * frames // 4 for entry in early):
            return pinned(), "written early and read to the end"
        return window(oldest), f"read up to {oldest} frames later"
