"""Detects growth over the frames of a stream: growing containers, and the lines that fill them."""

from __future__ import annotations

import gc
import os
import statistics
import sys
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from torchtrim.capture.growth.lines import (
    Filler,
    Fillers,
    Weight,
    containers,
    is_bounded,
    kind_of,
    length,
    line_at,
    of_coverage,
    weigh,
)
from torchtrim.capture.growth.owners import NamePath, find_owners, roots_here
from torchtrim.capture.growth.stream_frames import StreamFrames
from torchtrim.capture.watch import Listener, Watcher
from torchtrim.dispatch.modes import call_operator, enter_below, leave, tensors_among
from torchtrim.dispatch.places import CallSite, Places
from torchtrim.dispatch.storages import reachable_tensors, storages_in
from torchtrim.stream.growth import (
    SizeSample,
    keeps_growing,
    looks_at,
    per_frame,
    process_bytes,
    settled,
)

_MOST_TRACED = 8
"""Traced frames. Arbitrary: tracing lines is slow, and a report names few."""


@dataclass(eq=False)
class Suspect:
    """A container that got longer: its lengths, its weights, and its location."""

    kind: str
    lengths: list[SizeSample]
    weights: dict[int, Weight] = field(default_factory=dict)
    owner: NamePath | None = None

    @property
    def last(self) -> Weight:
        """Its latest weight."""
        return self.weights[max(self.weights)]


@dataclass(frozen=True)
class Grown:
    """A growth: bytes and entries added per frame, its location, and the line that fills it."""

    owner: NamePath
    kind: str
    bytes: float
    entries: float
    filler: Filler | None


class Growing(Listener):
    """A listener to a stream of at most `frames` frames that inspects memory at some of them.

    It calls `ended` after each frame with the frame's number and output, and `done` after the last one.
    """

    def __init__(
        self,
        *,
        frames: int,
        project: str,
        frames_of: str | None = None,
        ended: Callable[[int, Any], None] = lambda frame, output: None,
        done: Callable[[], None] = lambda: None,
    ) -> None:
        self.frames = 0
        self.clock = StreamFrames(frames_of)
        self.watcher = Watcher(self, trains=False)
        self.seconds: list[float] = []
        self._most = frames
        self._places = Places(project)
        self._alive = Alive(self._places)
        self._fillers = Fillers(self._places)
        self._ended, self._done = ended, done
        self._before: dict[int, int] = {}
        self._looked = 0
        self._suspects: dict[int, Suspect] = {}
        self._held: dict[int, Any] = {}
        self._made: dict[int, dict[Maker, dict[int, int]]] = {}
        self._slots: list[Grown] = []
        self._named: dict[Maker, tuple[NamePath, str]] = {}
        self._resident: dict[int, int] = {}
        self._traced = 0
        self._to_trace: dict[int, Any] = {}
        self._began = 0.0

    def __enter__(self) -> Growing:
        self._alive.begin()
        self.watcher.install()
        self.clock.listen(lambda output: self._frame_ended(output))
        return self

    def __exit__(self, *_: object) -> None:
        self.clock.stop()
        self._fillers.stop()
        self.watcher.remove()
        self._alive.end()

    def module_ends(self, module: nn.Module, output: Any, depth: int) -> None:
        raised = output is None and sys.exc_info()[0] is not None
        if self.clock.ends(module, depth) and not raised:
            self._frame_ended(output)

    @property
    def first(self) -> int:
        """The first frame in the measurement of growth."""
        return self.frames // 3

    def grown(self) -> list[Grown]:
        """Return the growths, largest first."""
        found = [*self._grown_containers(), *self._slots]
        return sorted(found, key=lambda one: (-one.bytes, one.owner.name))

    def frame_seconds(self) -> float:
        """Return the median time of frames without an inspection, or 0."""
        return statistics.median(self.seconds) if self.seconds else 0.0

    def process_growth(self) -> int:
        """Return the bytes a frame adds to the process, including noise."""
        samples = [SizeSample(*one) for one in sorted(self._resident.items())]
        return round(per_frame(settled(samples)))

    def _frame_ended(self, output: Any) -> None:
        now = time.perf_counter()
        self.frames += 1
        tracing = bool(self._fillers.traced)
        if self._began and not tracing:
            self.seconds.append(now - self._began)
        with _disable_current_modes():
            self._ended(self.frames - 1, output)
            if tracing:
                self._fillers.stop()
            looks = looks_at(self.frames) or self.frames == self._most
            if looks:
                self._look()
        if self.frames >= self._most:
            self._done()
        if self._to_trace:
            self._fillers.start(self._to_trace)
            self._to_trace = {}
        self._began = 0.0 if tracing or looks else time.perf_counter()

    def _look(self) -> None:
        self._drop_abandoned()
        self._resident[self.frames] = process_bytes()
        self._held = self._scan()
        self._looked, growing = self.frames, self._growing()
        for number, container in self._held.items():
            self._suspects[number].weights[self.frames] = weigh(container, growing)
        self._made[self.frames] = self._alive.by_maker()
        self._name(self._held)

    def _scan(self) -> dict[int, Any]:
        """Update the suspects. Containers that shrank or vanished are dropped."""
        before, self._before = self._before, {}
        suspects: dict[int, Suspect] = {}
        found: dict[int, Any] = {}
        own = self._own() | of_coverage() | {id(suspects), id(found), id(before)}
        own.add(id(own))
        for container in containers():
            number = id(container)
            if number in own or is_bounded(container):
                continue
            now = self._before[number] = length(container)
            suspect = self._suspects.get(number)
            if suspect is None and now > before.get(number, now):
                was = SizeSample(self._looked, before[number])
                suspect = Suspect(kind_of(container), [was])
            if suspect is None or now < suspect.lengths[-1].size:
                continue
            suspect.lengths.append(SizeSample(self.frames, now))
            suspects[number], found[number] = suspect, container
        self._suspects = suspects
        return found

    def _drop_abandoned(self) -> None:
        """Release the suspects, and forget the freed ones.

        `_held` keeps them alive between inspections, since Python could reuse the `id` of a freed one.
        """
        numbers = set(self._held)
        self._held.clear()
        gc.collect()
        for number in numbers - set(map(id, gc.get_objects())):
            self._suspects.pop(number, None)
            self._before.pop(number, None)

    def _name(self, found: Mapping[int, Any]) -> None:
        """Locate the growing containers while they exist, and trace the lines that fill them next."""
        self._slots = self._find_slots()
        unnamed = {n: s for n, s in self._growing().items() if s.owner is None}
        if unnamed:
            owners = find_owners(unnamed, roots_here(self._places, self.watcher.roots))
            for number, suspect in unnamed.items():
                nameless = NamePath(f"a {suspect.kind} that no name leads to", ())
                suspect.owner = owners.get(number, nameless)
        unfilled = {n: found[n] for n in self._growing() if n not in self._fillers.found}
        if unfilled and self._traced < _MOST_TRACED:
            self._traced += 1
            self._to_trace = unfilled

    def _growing(self) -> dict[int, Suspect]:
        return {
            number: suspect
            for number, suspect in self._suspects.items()
            if keeps_growing(settled(suspect.lengths))
        }

    def _grown_containers(self) -> Iterator[Grown]:
        taken: dict[int, set[int]] = {}
        order = sorted(self._growing().items(), key=lambda one: -one[1].last.bytes)
        for number, suspect in order:
            sizes = []
            for frame, weight in sorted(suspect.weights.items()):
                held = taken.setdefault(frame, set())
                new = {key: size for key, size in weight.storages.items() if key not in held}
                held.update(new)
                sizes.append(SizeSample(frame, weight.python + sum(new.values())))
            assert suspect.owner is not None
            entries = per_frame(settled(suspect.lengths))
            grew = max(per_frame(settled(sizes)), 0.0)
            filler = self._fillers.found.get(number) or self._maker_of(suspect)
            yield Grown(suspect.owner, suspect.kind, grew, entries, filler)

    def _maker_of(self, suspect: Suspect) -> Filler | None:
        held = suspect.last.storages
        made = self._made.get(max(suspect.weights), {})
        sums = {maker: sum(held.get(key, 0) for key in keys) for maker, keys in made.items()}
        best = max(sums, key=lambda one: sums[one], default=None)
        return _filler_of(best) if best is not None and sums[best] else None

    def _find_slots(self) -> list[Grown]:
        """Find lines whose tensors hold more and more bytes outside growing containers."""
        grown = self._growing().values()
        frames = [f for f in sorted(self._made) if all(f in one.weights for one in grown)]
        inside = {f: {key for one in grown for key in one.weights[f].storages} for f in frames}
        makers = self._made[frames[-1]] if frames else {}
        steady = {}
        for maker in makers:
            samples = []
            for frame in frames:
                held = self._made[frame].get(maker, {})
                outside = sum(size for key, size in held.items() if key not in inside[frame])
                samples.append(SizeSample(frame, outside))
            if keeps_growing(later := settled(samples)):
                steady[maker] = later
        unnamed = {m: makers[m].keys() - inside[frames[-1]] for m in steady if m not in self._named}
        if unnamed:
            tensors = _tensors_with(set().union(*unnamed.values()))
            wanted = {id(tensor) for some in tensors.values() for tensor in some}
            owners = find_owners(wanted, roots_here(self._places, self.watcher.roots))
            for maker, storages in unnamed.items():
                self._named[maker] = _owned(maker, storages, tensors, owners)
        return [
            Grown(*self._named[maker], per_frame(samples), 0.0, _filler_of(maker))
            for maker, samples in steady.items()
        ]

    def _own(self) -> set[int]:
        found: set[int] = set()
        for ours in (self, self._alive, self._fillers, self._places, self.clock, self.watcher):
            found.update((id(vars(ours)), *map(id, vars(ours).values())))
        for suspect in self._suspects.values():
            found.update((id(suspect.lengths), id(suspect.weights), id(vars(suspect))))
            found.update(id(weight.storages) for weight in suspect.weights.values())
        for made in self._made.values():
            found.update((id(made), *map(id, made.values())))
        return found


def _tensors_with(storages: set[int]) -> dict[int, list[torch.Tensor]]:
    found: dict[int, list[torch.Tensor]] = {}
    for tensor in reachable_tensors():
        for key in storages_in([tensor]).keys() & storages:
            found.setdefault(key, []).append(tensor)
    return found


def _owned(
    maker: Maker, held: set[int], tensors: Mapping[int, list[Any]], owners: Mapping[int, NamePath]
) -> tuple[NamePath, str]:
    """Return the owner of most of the storages, and their kind. Without a name they belong to autograd."""
    known = [
        owner
        for key in held
        if (owner := next((owners[id(o)] for o in tensors.get(key, ()) if id(o) in owners), None))
    ]
    if known and 2 * len(known) >= len(held):
        first = min(known, key=lambda one: (len(one.name), one.name))
        more = f" and {len(known) - 1} more" if len(known) > 1 else ""
        return first._replace(name=first.name + more), "tensor"
    if maker.graded:
        return NamePath("autograd's graph", ()), "graph"
    return NamePath("tensors that no name leads to", ()), "tensor"


def _filler_of(maker: Maker) -> Filler | None:
    if maker.spot is None:
        return None
    return Filler(line_at(maker.spot), line_at(maker.caller) if maker.caller else None)


class Maker(NamedTuple):
    """The call site that created a storage: the innermost line outside torch, the user's line that led
    there if it differs, and the grad mode."""

    spot: CallSite | None
    caller: CallSite | None
    graded: bool


class _MakerReference(weakref.ref[Any]):
    __slots__ = ("key", "maker")
    key: int
    maker: Maker


class Alive(TorchDispatchMode):
    """The storages that operators create between `begin` and `end`.

    Storages from before and temporaries inside an operator do not count.
    """

    def __init__(self, places: Places) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._places = places
        self._pid = os.getpid()
        self._living: dict[int, _MakerReference] = {}
        self._on_death = self._died

    def begin(self) -> None:
        """Begin watching, below the script's own modes."""
        enter_below(self)

    def end(self) -> None:
        """Stop watching."""
        leave(self)
        self._living.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = call_operator(func, args, kwargs or {})
        if os.getpid() == self._pid:
            for key, storage in storages_in(tensors_among((out,))).items():
                if key not in self._living:
                    watched = _MakerReference(storage, self._on_death)
                    spot, caller = self._places.find(sys._getframe().f_back)
                    watched.key, watched.maker = key, Maker(spot, caller, torch.is_grad_enabled())
                    self._living[key] = watched
        return out

    def by_maker(self) -> dict[Maker, dict[int, int]]:
        """Return the live storages with their bytes, by maker."""
        found: defaultdict[Maker, dict[int, int]] = defaultdict(dict)
        for key, watched in list(self._living.items()):
            if (storage := watched()) is not None:
                found[watched.maker][key] = storage.nbytes()
        return dict(found)

    def _died(self, watched: _MakerReference) -> None:
        if self._living.get(watched.key) is watched:
            del self._living[watched.key]
