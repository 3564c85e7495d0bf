"""Detects growth from step to step of training, by inspections between measured steps.

A container counts if it got longer in every inspected step from the second on, and a name of the program
leads to it; so does a name whose tensor is at the end of a growing autograd graph. Torchtrim's own objects
have no such name.

An inspection stores only numbers: holding a container until the next one would keep alive what the step in
between frees. So one more unmeasured step confirms that it is a single container that grows, and finds the
line that fills it.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from msgspec.structs import replace
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from torchtrim.capture.build import rank_and_world
from torchtrim.capture.growth.lines import (
    Fillers,
    containers,
    is_bounded,
    kind_of,
    length,
    number_of,
    of_coverage,
    weigh,
)
from torchtrim.capture.growth.owners import find_owners, roots_here
from torchtrim.dispatch.places import Places
from torchtrim.dispatch.storages import reachable_tensors
from torchtrim.records.profile import Growth, Place, Profile

LEAST_LOOKS = 4
"""Fewer inspections would report caches and histories that are still filling up."""
_MOST_NODES = 20_000
"""Arbitrary: bounds an inspection. The graph of a large model's step has fewer."""

_PATIENCE, _LEAST_SECONDS = 20.0, 2.0
"""Tracing each line slows Python code some ten times, and the first traced step also reads the sources."""
_NODE_BYTES = 256
"""Approximate bytes of an autograd node with its edges; its saved tensors are in the peak."""


@dataclass(eq=False)
class _LongerContainer:
    """A container: its length at each inspection, and its latest weights; a `kind` once it is confirmed."""

    lengths: list[int]
    weights: list[int] = field(default_factory=list)
    name: str = ""
    kind: str = ""
    hangs: bool = False


class StepGrowth:
    """A detector of growth over `steps` steps and one traced step; a few steps are too few.

    `modules` returns the roots so far. `runs`: the running step is traced.
    """

    def __init__(
        self, steps: int, places: Places, modules: Callable[[], Iterable[nn.Module]]
    ) -> None:
        self._steps = steps
        self._places = places
        self._modules = modules
        self._fillers = Fillers(places)
        self._looks = 0
        self._ended = 0
        self._suspects: dict[int, _LongerContainer] = {}
        self._followed: dict[int, tuple[Any, int]] = {}
        self._is_last = False
        self.runs = False
        self._until = 0.0
        self._depths: list[int] = []
        self._hangs_longest = ""
        self._peaks: list[int] = []

    def step_ended(self, peak: int) -> None:
        """Inspect memory. `peak`: the step's peak in bytes, 0 if it was not measured."""
        self._ended += 1
        self._peaks.append(peak)
        if self._ended < 2 or self._steps <= LEAST_LOOKS:
            return
        self._looks += 1
        with _disable_current_modes():
            self._look_at_containers()
            self._look_at_graphs()

    def next(self, seconds: float) -> bool:
        """Begin the traced step, which takes about this many seconds untraced.

        Return False if it is over, or if nothing seems to grow. Of several ranks all run it, since each waits
        for the others' gradients.
        """
        if self._is_last or self._looks < LEAST_LOOKS:
            return False
        self._is_last = True
        with _disable_current_modes():
            things = {id(one): one for one in containers() if id(one) in self._suspects}
            owners = find_owners(things, roots_here(self._places, self._modules()))
            self._suspects = {n: s for n, s in self._suspects.items() if n in owners}
            for number, suspect in self._suspects.items():
                suspect.name = owners[number].name
            self._followed = {n: (things[n], length(things[n])) for n in self._suspects}
            if self._followed:
                self._fillers.start({n: thing for n, (thing, _) in self._followed.items()})
        self._until = time.perf_counter() + _PATIENCE * seconds + _LEAST_SECONDS
        self.runs = rank_and_world()[1] > 1 or bool(self._followed)
        return self.runs

    def late(self) -> bool:
        """Return True if the traced step takes too long to be a step."""
        return self.runs and time.perf_counter() > self._until

    def step_ends(self) -> None:
        """Stop tracing, if it runs, and store the growths found."""
        self.runs = False
        self._fillers.stop()
        followed, self._followed = self._followed, {}
        for number, (thing, before) in followed.items():
            if length(thing) > before:
                suspect = self._suspects[number]
                suspect.kind, suspect.hangs = kind_of(thing), _holds_graph(thing)

    def _look_at_containers(self) -> None:
        longer: dict[int, _LongerContainer] = {}
        ours = of_coverage()
        ours |= set(map(id, (self._suspects, vars(self), self._peaks, self._depths, longer)))
        for suspect in self._suspects.values():
            ours |= {id(suspect.lengths), id(suspect.weights), id(vars(suspect))}
        for thing in containers():
            if id(thing) in ours or is_bounded(thing):
                continue
            known, now = self._suspects.get(id(thing)), length(thing)
            if self._looks == 1:
                longer[id(thing)] = _LongerContainer([now])
            elif known is not None and now > known.lengths[-1]:
                known.lengths.append(now)
                longer[id(thing)] = known
                if self._looks > 2:
                    known.weights.append(weigh(thing, ()).bytes)
        self._suspects = longer

    def _look_at_graphs(self) -> None:
        """Measure the longest autograd graph; at the end, find its owner."""
        hanging = {id(one): one for one in reachable_tensors() if _hangs(one)}
        sizes = {number: _nodes(one) for number, one in hanging.items()}
        self._depths.append(max(sizes.values(), default=0))
        if self._ended < self._steps or not _always_rises(self._depths):
            return
        longest = [number for number, size in sizes.items() if size == self._depths[-1]]
        owners = find_owners(longest, roots_here(self._places, self._modules()))
        self._hangs_longest = min((one.name for one in owners.values()), key=len, default="")

    def into(self, profile: Profile) -> Profile:
        """Return the profile with its growths."""
        self.step_ends()
        if self._looks < LEAST_LOOKS:
            return profile
        places = list(profile.places)
        growths = [*self._of_containers(places), *self._of_graphs()]
        found = sorted(growths, key=lambda one: -one.bytes)
        return replace(profile, growths=found, places=places)

    def _of_containers(self, places: list[Place]) -> Iterator[Growth]:
        for number, suspect in self._suspects.items():
            if not suspect.kind or len(suspect.weights) < 2:
                continue
            grew = _each(suspect.weights)
            filler = self._fillers.found.get(number)
            yield Growth(
                name=suspect.name,
                kind=f"{suspect.kind} of graphs" if suspect.hangs else suspect.kind,
                bytes=max(grew, self._peak_growth()) if suspect.hangs else grew,
                entries=_each(suspect.lengths),
                adapter="",
                place=number_of(places, filler and filler.place),
                caller=number_of(places, filler and filler.caller),
            )

    def _of_graphs(self) -> Iterator[Growth]:
        name = self._hangs_longest
        held = [suspect.name for suspect in self._suspects.values() if suspect.kind]
        if not name or name.startswith(tuple(held)):
            return
        nodes = _each(self._depths)
        size = max(nodes * _NODE_BYTES, self._peak_growth())
        yield Growth(
            name=name, kind="graph", bytes=size, entries=nodes, adapter="", place=-1, caller=-1
        )

    def _peak_growth(self) -> int:
        """Return the rise of the peak per step if it rises in every step, else 0."""
        peaks = [peak for peak in self._peaks[2:] if peak]
        return _each(peaks) if _always_rises(peaks) else 0


def _each(sizes: Sequence[int]) -> int:
    """Return the growth per step, or 0 if any step added nothing."""
    rises = [b - a for a, b in itertools.pairwise(sizes)]
    return int(statistics.median(rises)) if rises and min(rises) >= 0 else 0


def _always_rises(sizes: Sequence[int]) -> bool:
    return len(sizes) > 1 and all(a < b for a, b in itertools.pairwise(sizes))


def _hangs(tensor: torch.Tensor) -> bool:
    return tensor.requires_grad and tensor.grad_fn is not None


def _holds_graph(container: Any) -> bool:
    entries = container.values() if isinstance(container, dict) else container
    newest = list(entries)[-1:] if isinstance(container, (dict, list, set)) else []
    return any(isinstance(one, torch.Tensor) and _hangs(one) for one in newest)


def _nodes(tensor: torch.Tensor) -> int:
    seen: set[Any] = set()
    waiting: list[Any] = [tensor.grad_fn]
    while waiting and len(seen) < _MOST_NODES:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting += [before for before, _ in node.next_functions]
    return len(seen)
