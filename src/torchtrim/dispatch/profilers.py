"""Whether the process's one profiler is taken: by the script, or by us."""

from __future__ import annotations

import gc

import torch
from torch._C._autograd import _profiler_enabled
from torch.autograd import profiler as autograd_profiler
from torch.autograd.profiler import record_function


def is_taken() -> bool:
    """Whether a profiler runs, or waits to be started: to start another would crash it."""
    return runs() or waits_to_start()


def runs() -> bool:
    """Whether a profiler runs."""
    return bool(_profiler_enabled())


def waits_to_start() -> bool:
    """Whether a profiler is prepared and does not run yet. Looks through all objects, which takes a while."""
    kinds = (torch.profiler.profile, autograd_profiler.profile)
    return any(isinstance(thing, kinds) and _waits(thing) for thing in gc.get_referrers(*kinds))


def _waits(thing: torch.profiler.profile | autograd_profiler.profile) -> bool:
    """Whether it is prepared. One that is switched off, or was not constructed, lacks most attributes."""
    if isinstance(thing, torch.profiler.profile):
        action = getattr(thing, "current_action", None)
        return action is torch.profiler.ProfilerAction.WARMUP
    return bool(getattr(thing, "entered", False)) and thing.kineto_results is None


def open_ranges() -> list[record_function]:
    """The ranges of `record_function` that run, the outer ones first, as the collector has them."""
    return [
        thing
        for thing in gc.get_referrers(record_function)
        if isinstance(thing, record_function) and getattr(thing, "record", None) is not None
    ]


def end_open_ranges() -> None:
    """Tell the profiler that all ranges end, before it does.

    One that ended later would write its time into the profiler's memory, which is another's by then.
    """
    for one in open_ranges():
        torch.ops.profiler._record_function_exit._RecordFunction(one.record)
