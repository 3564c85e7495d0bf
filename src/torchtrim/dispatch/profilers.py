"""Checks if the script or torchtrim uses the process's only profiler."""

from __future__ import annotations

import gc

import torch
from torch._C._autograd import _profiler_enabled
from torch.autograd import profiler as autograd_profiler
from torch.autograd.profiler import record_function


def is_taken() -> bool:
    """Return True if a profiler is running or prepared: starting another would crash it."""
    return runs() or waits_to_start()


def runs() -> bool:
    """Return True if a profiler is running."""
    return bool(_profiler_enabled())


def waits_to_start() -> bool:
    """Return True if a profiler is prepared but not running. Slow: searches all objects."""
    kinds = (torch.profiler.profile, autograd_profiler.profile)
    return any(isinstance(thing, kinds) and _waits(thing) for thing in gc.get_referrers(*kinds))


def _waits(thing: torch.profiler.profile | autograd_profiler.profile) -> bool:
    # A disabled or half-constructed profiler lacks most attributes.
    if isinstance(thing, torch.profiler.profile):
        action = getattr(thing, "current_action", None)
        return action is torch.profiler.ProfilerAction.WARMUP
    return bool(getattr(thing, "entered", False)) and thing.kineto_results is None


def open_ranges() -> list[record_function]:
    """Return the open `record_function` ranges, outer ones first, from the garbage collector."""
    return [
        thing
        for thing in gc.get_referrers(record_function)
        if isinstance(thing, record_function) and getattr(thing, "record", None) is not None
    ]


def end_open_ranges() -> None:
    """End all open ranges before the profiler stops.

    A range that ended later would write its time into freed memory of the profiler.
    """
    for one in open_ranges():
        torch.ops.profiler._record_function_exit._RecordFunction(one.record)
