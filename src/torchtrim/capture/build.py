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
from torchtrim.capture.saved import Use, saved_tensors, type_name
from torchtrim.dispatch.places import Spot, line_of
from torchtrim.dispatch.storages import Life
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
    rank, world = _rank_and_world()
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
        modules=modules.settled(),
        calls=recorder.calls,
        places=places.records,
        labels=recorder.labels,
        waits=list(waits),
        syncs=_syncs(recorder, operators, places, setting.device),
        saved=saved_tensors(recorder.saved, recorder.makers, operators, births),
        saved_known=True,
        rank=rank,
        world=world,
        clock=recorder.start_ns / 1e9,
        collectives=recorder.collectives.records(recorder.start_ns),
    )
    if not recorder.workspaces or is_emulated(setting.device):
        return profile
    return replace(profile, peak_bytes=max(timeline(profile).high))


def _syncs(
    recorder: Recorder, operators: list[Operator], places: _PlaceTable, device: str
) -> list[Sync]:
    """Build the syncs; they have a duration only on a real device."""
    measured = not is_emulated(device)
    return [
        Sync(
            wait.sync.row, wait.sync.operator, op.phase, op.place, op.caller, _seconds(op, measured)
        )
        if (op := operators[wait.sync.operator] if wait.sync.operator >= 0 else None)
        else Sync(
            wait.sync.row,
            -1,
            wait.phase,
            places.number(wait.spot),
            places.number(wait.caller),
            None,
        )
        for wait in recorder.waits
    ]


def _seconds(op: Operator, measured: bool) -> float | None:
    return op.seconds if measured else None


class _PlaceTable:
    def __init__(self) -> None:
        self.records: list[Place] = []
        self._known: dict[Place, int] = {}
        self._numbers: dict[tuple[int, int], int] = {}

    def number(self, spot: Spot | None) -> int:
        if spot is None:
            return -1
        code, instruction = spot
        known = self._numbers.get((id(code), instruction))
        if known is None:
            place = Place(code.co_filename, line_of(spot), code.co_qualname)
            known = self._known.setdefault(place, len(self.records))
            if known == len(self.records):
                self.records.append(place)
            self._numbers[(id(code), instruction)] = known
        return known


def _tensor(use: Use) -> TensorUse:
    number, dtype, shape, strides = use
    return TensorUse(number, type_name(dtype), tuple(shape), strides)


def _operator(op: RawOperator, places: _PlaceTable, transient: int, start_ns: int) -> Operator:
    return Operator(
        name=name_of(op.func),
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
        random=_is_random(op.func),
    )


def name_of(func: Any) -> str:
    """Return an operator's name with its overload, such as `aten::add.Tensor`."""
    name: str = func.name()
    return name if "." in name else f"{name}.default"


_RANDOM: dict[Any, bool] = {}


def _is_random(func: Any) -> bool:
    """Return True for an operator tagged as random, or one that takes a generator."""
    known = _RANDOM.get(func)
    if known is None:
        schema = getattr(func, "_schema", None)
        known = _RANDOM[func] = torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()) or (
            schema is not None and any("Generator" in str(a.type) for a in schema.arguments)
        )
    return known


def _rank_and_world() -> tuple[int, int]:
    """This process's number, and how many there are, where processes of torch work together."""
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return 0, 1
    return distributed.get_rank(), distributed.get_world_size()


def _transients(recorder: Recorder, watched: Watched) -> list[int]:
    """How far memory rose inside each operator; at least by the outputs that it made."""
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
    for number in _of_all_ranks(operators):
        lives[number].kind = lives[number].kind or "gathered"
    readers = _phases_of_readers(operators, len(lives))
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


def _of_all_ranks(operators: list[Operator]) -> set[int]:
    """Storages that collectives, and FSDP2's copies before and after them, read or write: whole gradients
    of a block, and buffers."""
    return {
        use.storage
        for op in operators
        if op.name.startswith(_OF_RANKS)
        for use in (*op.inputs, *op.outputs)
    }


def _phases_of_readers(operators: list[Operator], count: int) -> list[set[str]]:
    """In which phases each storage is read; in backward by gradients of forward operators only."""
    readers: list[set[str]] = [set() for _ in range(count)]
    for op in operators:
        if op.phase != "backward" or op.forward >= 0:
            for use in op.inputs:
                readers[use.storage].add(op.phase)
    return readers


def _kind(life: Life, operators: list[Operator], readers: set[str]) -> Kind:
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


OLDEST, NEWEST = (2, 11), (2, 15)


def untested(version: str) -> str | None:
    """Return a warning about an untested version of torch, None for a tested one."""
    found = re.match(r"(\d+)\.(\d+)", version)
    here = (int(found[1]), int(found[2])) if found else (0, 0)
    if OLDEST <= here <= NEWEST:
        return None
    than = "older" if here < OLDEST else "newer"
    return (
        f"torch {version} is {than} than the versions torchtrim was tested with "
        f"({_words(OLDEST)} to {_words(NEWEST)}). What it records may be incomplete; the certificate still "
        "compares every bit."
    )


def _words(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
