"""Builds a profile from a recording: names, lines, and the kind of every storage."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from msgspec.structs import replace

from torchtrim import __version__
from torchtrim.analysis.timeline import timeline
from torchtrim.capture.allocator import Watched, rss_bytes
from torchtrim.capture.modules import Modules
from torchtrim.capture.recorder import RawOperator, Recorder
from torchtrim.capture.saved import RawUse, saved_tensors, type_name
from torchtrim.dispatch.modes import full_name
from torchtrim.dispatch.places import CallSite, line_of
from torchtrim.dispatch.storages import StorageLife
from torchtrim.records.profile import (
    Kind,
    LoaderWait,
    Operator,
    Place,
    Profile,
    Storage,
    Sync,
    TensorUse,
    is_emulated,
)

_BACKWARD = ("backward", "recompute")
_OF_RANKS = ("c10d::_", "fsdp::")
"""Collectives, and FSDP2's copies before and after them: of full gradients of a block, and buffers."""


class Setting(NamedTuple):
    """The origin of a profile."""

    device: str
    script: str
    project: str


def build(
    recorder: Recorder,
    modules: Modules,
    waits: Sequence[LoaderWait],
    watched: Watched,
    baseline: int,
    setting: Setting,
) -> Profile:
    """Build the profile of a stopped recorder. `baseline`: bytes alive before the step."""
    places = _PlaceTable()
    transients = _transients(recorder, watched)
    operators = [
        _operator(op, places, transient, recorder.start_ns)
        for op, transient in zip(recorder.operators, transients, strict=True)
    ]
    tracked = recorder.storages.peak_bytes
    births = [life.birth for life in recorder.storages.lives]
    rank, world = rank_and_world()
    syncs = _syncs(recorder, operators, places, setting.device)  # Adds places.
    records = modules.settled(places.number)  # Adds places.
    profile = Profile(
        torchtrim=__version__,
        torch=str(torch.__version__),
        device=setting.device,
        script=setting.script,
        project=setting.project,
        step_seconds=(recorder.end_ns - recorder.start_ns) / 1e9,
        peak_bytes=max(baseline + watched.peak, tracked),
        tracked_peak_bytes=tracked,
        reserved_bytes=watched.reserved,
        rss_bytes=rss_bytes(),
        operators=operators,
        storages=_storages(recorder, operators),
        modules=records,
        calls=recorder.calls,
        places=list(places.numbers),
        labels=recorder.labels,
        waits=list(waits),
        syncs=syncs,
        saved=saved_tensors(recorder.saved, recorder.makers, operators, births),
        saved_known=True,
        rank=rank,
        world=world,
        clock=recorder.start_ns / 1e9,
        collectives=recorder.collectives.records(recorder.start_ns),
        functions=recorder.functions.records(),
    )
    if not recorder.workspaces or is_emulated(setting.device):
        return profile
    return replace(profile, peak_bytes=max(timeline(profile).high))


def _syncs(
    recorder: Recorder, operators: list[Operator], places: _PlaceTable, device: str
) -> list[Sync]:
    """Build the syncs; they have a duration only on a real device."""
    syncs = []
    for row, operator, phase, spot, caller in recorder.syncs:
        if operator < 0:
            site = places.number(spot), places.number(caller)
            syncs.append(Sync(row, -1, phase, *site, None))
        else:
            op = operators[operator]
            seconds = None if is_emulated(device) else op.seconds
            syncs.append(Sync(row, operator, op.phase, op.place, op.caller, seconds))
    return syncs


class _PlaceTable:
    def __init__(self) -> None:
        self.numbers: dict[Place, int] = {}
        self._known: dict[tuple[int, int], int] = {}

    def number(self, spot: CallSite | None) -> int:
        if spot is None:
            return -1
        code, instruction = spot
        key = id(code), instruction
        if key not in self._known:
            place = Place(code.co_filename, line_of(spot), code.co_qualname)
            self._known[key] = self.numbers.setdefault(place, len(self.numbers))
        return self._known[key]


def _tensor(use: RawUse) -> TensorUse:
    number, dtype, shape, strides = use
    return TensorUse(number, type_name(dtype), tuple(shape), strides)


def _operator(op: RawOperator, places: _PlaceTable, transient: int, start_ns: int) -> Operator:
    return Operator(
        name=full_name(op.func),
        phase=op.phase,
        module=op.module,
        place=places.number(op.spot),
        caller=places.number(op.caller),
        label=op.label,
        forward=op.forward,
        inputs=tuple(map(_tensor, op.inputs)),
        outputs=tuple(map(_tensor, op.outputs)),
        mutates=op.mutates,
        start=max(op.start_ns - start_ns, 0) / 1e9,
        seconds=(op.end_ns - op.start_ns) / 1e9,
        transient_bytes=transient,
        random=op.random,
    )


def rank_and_world() -> tuple[int, int]:
    """Return this process's rank, and the number of processes of its job, 1 without a process group."""
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return 0, 1
    return distributed.get_rank(), distributed.get_world_size()


def _transients(recorder: Recorder, watched: Watched) -> list[int]:
    """Return the rise of memory inside each operator, at least the bytes of its outputs."""
    lives = recorder.storages.lives
    made = [
        sum(
            recorder.storages.counted_bytes(lives[number])
            for number in {use[0] for use in op.outputs}
            if lives[number].birth == i
        )
        for i, op in enumerate(recorder.operators)
    ]
    if recorder.workspaces:
        return [size + more for size, more in zip(made, recorder.workspaces, strict=True)]
    raised = set(recorder.raised)
    rises = [rise for number, rise in enumerate(watched.transients) if number not in raised]
    return list(map(max, made, rises)) if len(rises) == len(made) else made


def _storages(recorder: Recorder, operators: list[Operator]) -> list[Storage]:
    lives = recorder.storages.lives
    readers: list[set[str]] = [set() for _ in lives]
    for op in operators:
        if op.name.startswith(_OF_RANKS):
            for use in (*op.inputs, *op.outputs):
                lives[use.storage].kind = lives[use.storage].kind or "gathered"
        # A backward operator counts as a reader only if it belongs to a forward operator.
        if op.phase != "backward" or op.forward >= 0:
            for use in op.inputs:
                readers[use.storage].add(op.phase)
    last = len(operators)
    return [
        Storage(
            bytes=life.bytes,
            kind=_kind(life, operators, readers[number]),
            birth=min(life.birth, last - 1),
            death=life.death if life.death >= 0 else last,
            device=life.device,
            name=life.name,
            pool=life.pool,
            kept=life.kept,
        )
        for number, life in enumerate(lives)
    ]


def _kind(life: StorageLife, operators: list[Operator], readers: set[str]) -> Kind:
    if life.kind:
        return cast(Kind, life.kind)
    if life.birth < 0 or not operators:
        return "input"
    made = operators[min(life.birth, len(operators) - 1)].phase
    if made in ("forward", "recompute"):
        backward = life.released or not readers.isdisjoint(_BACKWARD)
        return "activation" if backward and "optimizer" not in readers else "temporary"
    if made == "loader" or (made == "other" and "forward" in readers):
        return "input"
    return "temporary"


OLDEST, NEWEST = (2, 11), (2, 15)  # of torch, that the tests have run with


def untested(version: str) -> str | None:
    """Return a warning about an untested version of torch, None for a tested one."""
    found = re.match(r"(\d+)\.(\d+)", version)
    here = (int(found[1]), int(found[2])) if found else (0, 0)
    if OLDEST <= here <= NEWEST:
        return None
    than = "older" if here < OLDEST else "newer"
    return (
        f"torch {version} is {than} than the versions torchtrim was tested with "
        f"({OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}). The recording may be incomplete; the "
        "certificate still compares every bit."
    )
