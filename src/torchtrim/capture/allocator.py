"""Measures a step's allocated peak, and the rise of memory inside each operator.

On CPU it reads the profiler's memory events, on CUDA the caching allocator's counters. They include the
scratch of kernels, which dispatch cannot see.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import os
import sys
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType, ModuleType
from typing import Any, NamedTuple

import torch
from torch._C._autograd import _disable_profiler, _enable_profiler
from torch._C._profiler import RecordScope, _EventType
from torch.autograd import profiler as autograd_profiler
from torch.autograd import profiler_legacy

from torchtrim.capture.recorder import MARK, profiler_range
from torchtrim.dispatch.profilers import end_open_ranges, is_taken
from torchtrim.dryrun.run import current as current_dry
from torchtrim.emulator.device import current as current_emulation
from torchtrim.records.profile import is_emulated

_OWN = "torchtrim::own"
_PHASE = "torchtrim::phase "
_OWN_BLOCK = 0
"""In place of the bytes of torchtrim's own blocks: they do not count."""
_NUMBER = 8
"""Bytes of a tensor of a Python number."""


class Watched(NamedTuple):
    """Bytes above those alive at the start: `peak`, `end`, and `transients` of each marked operator.

    `reserved` is the caching allocator's peak, `before` its bytes alive at the start; None without one.
    `phases`: the highest of each phase that was marked.
    """

    peak: int
    end: int
    transients: list[int]
    reserved: int | None
    before: int | None = None
    phases: Mapping[str, int] = MappingProxyType({})


NO_SUMS: Mapping[int, int] = MappingProxyType({})
NOTHING = Watched(0, 0, [], None)


class Freed(NamedTuple):
    """A storage from before the watch that died before the operator of the mark with this number ended."""

    address: int
    size: int
    mark: int


class _Block(NamedTuple):
    """A block that is allocated, or freed if its bytes are negative; `moment` in ns."""

    moment: int
    size: int
    address: int


class Allocator:
    """An allocator to watch for one step; the base class watches none, as in a dry run.

    `cuts_at_marks`: it measures the transients of marked operators.
    """

    cuts_at_marks = False

    def start(self) -> None:
        """Begin to watch."""

    def stop(self, in_place: Mapping[int, int] = NO_SUMS, freed: Iterable[Freed] = ()) -> Watched:
        """End, and return the bytes. `in_place`: bytes that a marked operator needs only under a mode."""
        return NOTHING


class CpuAllocator(Allocator):
    """The CPU allocator, by the profiler's memory events.

    Frees are reported only for blocks whose allocation was reported, so watch the previous step as well, and
    tell `stop` of older storages that died. A process has one profiler, and the script's own takes
    precedence. Only the user scope is profiled, at a sixth of the cost of profiling all operators. One
    allocator for all steps knows a block of one step whose free nobody reported by its address, in the next.
    """

    cuts_at_marks = True

    def __init__(self) -> None:
        self._runs = False
        self._undo = contextlib.ExitStack()
        self._live: dict[int, int] = {}

    def start(self) -> None:
        """Begin, unless the script uses the profiler or this is a dry run."""
        if is_taken() or current_dry() is not None:
            return
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        profiler: Any = autograd_profiler.profile(profile_memory=True, record_shapes=True)
        profiler._prepare_trace()
        config = profiler.config(create_trace_id=False)
        enable: Any = _enable_profiler
        enable(config, profiler.kineto_activities, {RecordScope.USER_SCOPE})
        self._runs = True
        self._give_way(autograd_profiler, "_prepare_profiler")
        self._give_way(autograd_profiler, "_enable_profiler")
        self._give_way(profiler_legacy, "_enable_profiler_legacy")

    def _give_way(self, module: ModuleType, name: str) -> None:
        """End without a result when the script starts a profiler through this function."""
        original = getattr(module, name)

        def start_theirs(*args: Any, **kwargs: Any) -> Any:
            self._end()
            return original(*args, **kwargs)

        setattr(module, name, start_theirs)
        self._undo.callback(setattr, module, name, original)

    def _end(self) -> list[Any] | None:
        self._undo.close()
        runs, self._runs = self._runs, False
        if runs:
            end_open_ranges()
        return _disable_profiler().experimental_event_tree() if runs else None

    def stop(self, in_place: Mapping[int, int] = NO_SUMS, freed: Iterable[Freed] = ()) -> Watched:
        """End; return zeros if there was a reason not to begin."""
        events = self._end()
        if events is None:
            return NOTHING
        blocks: list[_Block] = []
        ranges: dict[str, list[tuple[int, int]]] = {MARK: [], _OWN: []}
        phases: list[tuple[int, str]] = []
        for event in _all_of(events):
            if event.tag == _EventType.Allocation:
                said = event.extra_fields
                if said.device.type == "cpu":
                    blocks.append(_Block(event.start_time_ns, said.alloc_size, said.ptr))
            elif event.name.startswith(_PHASE):
                phases.append((event.start_time_ns, event.name.removeprefix(_PHASE)))
            elif event.name in ranges:
                ranges[event.name].append((event.start_time_ns, event.end_time_ns))
        blocks, marks = sorted(blocks), sorted(ranges[MARK])
        blocks = sorted([*blocks, *_unreported(blocks, marks, self._live, freed)])
        memory = _of_the_script(blocks, sorted(ranges[_OWN]), self._live)
        memory = _without_numbers(memory, marks)
        memory = _in_place(memory, [(marks[number], size) for number, size in in_place.items()])
        running = [0, *itertools.accumulate(size for _, size in memory)]
        rises, highest = _rises(memory, marks), _phases([at for at, _ in memory], running, phases)
        return Watched(max(running), running[-1], rises, None, phases=highest)


def mark_phase(name: str) -> None:
    """Mark in the profile that a phase begins, which lasts until the next one does."""
    with profiler_range(_PHASE + name):
        pass


def _phases(moments: list[int], levels: list[int], phases: list[tuple[int, str]]) -> dict[str, int]:
    """Return the highest level of each phase. `levels`: at the start, and after each moment."""
    found: dict[str, int] = {}
    phases = sorted(phases)
    places = [*(bisect.bisect_left(moments, begin) for begin, _ in phases), len(moments)]
    for (_, name), first, last in zip(phases, places, places[1:], strict=False):
        found[name] = max(found.get(name, 0), *levels[first : last + 1])
    return found


def own() -> Any:
    """Return a profiler range that excludes torchtrim's own memory."""
    return profiler_range(_OWN)


def _all_of(events: Iterable[Any]) -> Iterator[Any]:
    """Yield events of the profiler and those inside them, each before its children."""
    for event in events:
        yield event
        yield from _all_of(event.children)


def _unreported(
    blocks: Iterable[_Block],
    marks: Sequence[tuple[int, int]],
    live: Container[int],
    freed: Iterable[Freed],
) -> Iterator[_Block]:
    """Yield the frees of storages whose allocation was not watched. `live`: addresses of blocks that were."""
    first = {block.address: block.size for block in reversed([*blocks])}
    for address, size, mark in freed:
        if address not in live and first.get(address, 0) >= 0 and mark < len(marks):
            yield _Block(marks[mark][0], -size, address)


def _of_the_script(
    blocks: list[_Block], own: list[tuple[int, int]], live: dict[int, int]
) -> list[tuple[int, int]]:
    """Return moments and bytes without torchtrim's own blocks. Both lists are sorted by time.

    `live`: bytes of the blocks alive before, by their addresses, and then of those after.

    A block that is freed in one of torchtrim's ranges without having been allocated there is the script's:
    the garbage collector runs at any moment, and a graph of gradients of gradients is a cycle. A block that
    a thread without a profiler frees, such as gloo's, counts until its address is allocated again.
    """
    starts = [begin for begin, _ in own]
    found = []
    for moment, size, address in blocks:
        before = live.pop(address, None)
        if size < 0:
            if before != _OWN_BLOCK:
                found.append((moment, size))
            continue
        if before:
            found.append((moment, -before))
        index = bisect.bisect_right(starts, moment) - 1
        if index >= 0 and moment <= own[index][1]:
            live[address] = _OWN_BLOCK
        else:
            live[address] = size
            found.append((moment, size))
    return found


def _without_numbers(
    memory: list[tuple[int, int]], marks: list[tuple[int, int]]
) -> list[tuple[int, int]]:
    """Return the events without the Python numbers that torch makes tensors before a mode sees the operator.

    The mode is given the number, so the operator makes its tensor again, as it alone does without a mode.
    """
    moments = [moment for moment, _ in memory]
    dropped, before = set(), 0
    for begin, end in marks:
        first, last = bisect.bisect_left(moments, begin), bisect.bisect_right(moments, end)
        around = memory[first - 1 : first] + memory[last : last + 1]
        outside = [size for _, size in around] == [_NUMBER, -_NUMBER] and around[0][0] > before
        if outside and any(size == _NUMBER for _, size in memory[first:last]):
            dropped |= {first - 1, last}
        before = end
    return [event for number, event in enumerate(memory) if number not in dropped]


def _in_place(
    memory: list[tuple[int, int]], sums: list[tuple[tuple[int, int], int]]
) -> list[tuple[int, int]]:
    """Return the events without the result of each range in `sums`, and without the next free of its size."""
    moments = [moment for moment, _ in memory]
    dropped = set()
    for (begin, _), size in sums:
        for wanted in (size, -size):
            places = range(bisect.bisect_left(moments, begin), len(memory))
            found = next((n for n in places if n not in dropped and memory[n][1] == wanted), None)
            dropped |= {found}
    return [event for number, event in enumerate(memory) if number not in dropped]


def _rises(memory: list[tuple[int, int]], marks: list[tuple[int, int]]) -> list[int]:
    """Return the rise of memory inside each marked range. Both lists are sorted by time."""
    rises = []
    position = 0
    for begin, end in marks:
        while position < len(memory) and memory[position][0] < begin:
            position += 1
        level = highest = 0
        while position < len(memory) and memory[position][0] <= end:
            level += memory[position][1]
            highest = max(highest, level)
            position += 1
        rises.append(highest)
    return rises


class CudaAllocator(Allocator):
    """CUDA's caching allocator. The peak counter is reset at the start of each step."""

    def __init__(self, device: int = 0) -> None:
        self._device = device
        self._before = 0

    def start(self) -> None:
        """Reset the peaks."""
        self._settle()
        torch.cuda.reset_peak_memory_stats(self._device)
        self._before = torch.cuda.memory_allocated(self._device)

    def stop(self, in_place: Mapping[int, int] = NO_SUMS, freed: Iterable[Freed] = ()) -> Watched:
        """Read the peaks."""
        self._settle()
        return Watched(
            torch.cuda.max_memory_allocated(self._device) - self._before,
            torch.cuda.memory_allocated(self._device) - self._before,
            [],
            torch.cuda.max_memory_reserved(self._device),
            self._before,
        )

    def _settle(self) -> None:
        """Wait for the device, but not an emulated one: that would hide the script's races."""
        if current_emulation() is None:
            torch.cuda.synchronize(self._device)


def allocator_for(device: str) -> Allocator:
    """Return the allocator of a device such as `"cpu"`, `"emulated"` or `"cuda:0"`."""
    if is_emulated(device):
        return CudaAllocator()
    if current_dry() is not None:
        return Allocator()
    if device.startswith("cuda"):
        return CudaAllocator(torch.device(device).index or 0)
    return CpuAllocator()


def rss_bytes() -> int | None:
    """Return the process's peak resident memory in bytes, or None if the system does not report it."""
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
