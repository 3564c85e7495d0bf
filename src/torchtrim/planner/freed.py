"""Bytes that each technique of a plan frees, over the original step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from operator import sub
from typing import NamedTuple

from torchtrim.analysis.prices import device_of
from torchtrim.executor.registry import Option, edit_of, in_files_of, names, options_of
from torchtrim.records.plan import Technique
from torchtrim.records.profile import Profile, is_emulated
from torchtrim.step.edits import Edit, overwritten
from torchtrim.step.from_profile import on_device, step_of
from torchtrim.step.simulate import timeline
from torchtrim.step.step import Step


class FreedBytes(NamedTuple):
    """The bytes that a technique frees at each operator, on top of those before it; negative if it adds."""

    technique: str
    bytes: list[int]


def freed_bytes(profile: Profile, techniques: Iterable[Technique]) -> list[FreedBytes]:
    """Simulate each technique of a plan on top of those before it; without edits are left out."""
    step = step_of(profile)
    if is_emulated(profile.device):
        step = on_device(step, device_of(profile))
    high, free, taken, found = timeline(step).high, set[int](), list[Option](), list[FreedBytes]()
    known = frozenset(names())
    for one in techniques:
        if one.name not in known:
            continue
        written = overwritten(step, free)
        taken += _options(written, one)
        free.update(task for edit in _edits(written, taken) for task in edit.overwrites)
        written = overwritten(step, free)
        lower = timeline(written, _edits(written, taken)).high
        if lower != high:
            found.append(FreedBytes(one.name, list(map(sub, high, lower))))
        high = lower
    return found


def _edits(step: Step, options: Iterable[Option]) -> list[Edit]:
    return [edit for option in options if (edit := edit_of(step, option)) is not None]


def _options(step: Step, one: Technique) -> Iterator[Option]:
    """Yield the option of each place of a technique; a place may have details after the option's."""
    offered = [*options_of(one.name, step), *in_files_of(one.name, step)]
    for place in one.where:
        here = [option for option in offered if f"{place} ".startswith(f"{option.where} ")]
        if here:
            yield max(here, key=lambda option: (len(option.where), _agrees(option, one)))


def _agrees(option: Option, one: Technique) -> bool:
    return dict(option.settings).items() <= one.options.items()
