"""What the tasks of a step cost: as they were measured where the step was recorded, or on a named device."""

from __future__ import annotations

from dataclasses import replace

from torchtrim.costs.devices import Device
from torchtrim.costs.roofline import estimate
from torchtrim.costs.syncs import price_syncs
from torchtrim.step.step import Overhead, Step

_BOUND_BY_DEVICE = 0.9
_NO_OVERHEAD = Overhead(task=0.0, span=2e-5, random_state=0, recipe=0.0, watched=0.0)


def on_device(step: Step, device: Device) -> Step:
    """The step with the seconds that its tasks take on a device, by the roofline.

    Where the device is busy nearly all the time what runs again costs its kernels; where the host does not
    keep up, what the host needs to launch them. A step that was not read from a profile stays as it is.
    """
    if step.profile is None:
        return step
    times = estimate(step.profile, device)
    whole = price_syncs(step.profile, device, ())
    by_device = whole.device_busy_ms >= _BOUND_BY_DEVICE * whole.step_ms
    seconds = times.device_seconds if by_device else times.host_seconds
    tasks = (t._replace(seconds=s) for t, s in zip(step.tasks, seconds, strict=True))
    overhead = _NO_OVERHEAD if by_device else step.overhead
    return replace(step, tasks=tuple(tasks), seconds=whole.step_ms / 1e3, overhead=overhead)
