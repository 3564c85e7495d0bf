"""The loader takes a twentieth of the step's time or more.

## What it does

Runs a few steps with their loader and a few whose batches are already loaded, without recording.
The difference is the price, the most that a faster loader can save, and it is reported from 5 % of
the step. One batch is then read outside its loader, so that the finding can name the slow part:
waiting for data, building the samples, collating, handing a batch over from a worker, too few
workers or too many.

If no step can run without its loader, such as on an emulated device or if the script ends too soon,
the price is the time that the step waited, reported from 20 % of the step.

## Why is this bad?

The step computes nothing during a loader wait. With `num_workers=0`, the default, the training
process reads, decodes and collates every batch between two steps.

## Example

```python
loader = DataLoader(dataset, batch_size=64)
```

## Use instead

```python
loader = DataLoader(
    dataset, batch_size=64, num_workers=4, persistent_workers=True, pin_memory=True
)
for inputs, labels in loader:
    inputs = inputs.to(device, non_blocking=True)
```

`pin_memory=True` with `non_blocking=True` is for a CUDA device. If more workers do not help, the
data set itself is too slow: decode once and store, read larger pieces, transform batches on the
device.

## Fix safety

Workers fetch the same samples in the same order. Random transforms draw from each worker's own
generator, so their numbers depend on the number of workers: the step computes the same function of
other random numbers. Workers need their own memory, and a main guard if processes are spawned.

## References

* [torch.utils.data: single- and multi-process data loading](https://pytorch.org/docs/stable/data.html#single-and-multi-process-data-loading)
* [Performance tuning guide: asynchronous data loading](https://pytorch.org/tutorials/recipes/recipes/tuning_guide.html)
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil

from torchtrim.analysis.loaders import verdict
from torchtrim.analysis.user_source import CodeLine
from torchtrim.core.units import format_seconds
from torchtrim.records.finding import Finding
from torchtrim.records.loader import LoaderCost
from torchtrim.records.profile import Profile
from torchtrim.rules.base import Rule

_WAITED = 0.2  # Arbitrary; as the documentation says: without a comparison, waits may cost less.
_MOST_WORKERS = 8  # Arbitrary; if the number of cores is unknown.


def check(profile: Profile) -> Iterator[Finding]:
    """Yield one finding if the loader takes a large part of the step."""
    cost = profile.loader
    if cost is not None and cost.ready_seconds is not None:
        yield from compared(profile.script, cost)
        return
    waited = sum(wait.seconds for wait in profile.waits)
    step = profile.step_seconds
    if cost is not None:
        waited, step = cost.price, cost.step_seconds
    if 0 < step * _WAITED <= waited and (profile.waits or cost is not None):
        yield _waited(profile, waited, max(step, waited))


def compared(script: str, cost: LoaderCost) -> Iterator[Finding]:
    """Yield one finding if a step with a loaded batch is that much faster."""
    if (found := verdict(cost)) is None:
        return
    ready = format_seconds(cost.ready_seconds or 0.0)
    workers = cost.settings.workers
    having = f"with {_count(workers)}" if workers else "without workers"
    because = f": {found.because}" if found.because else ""
    yield CodeLine(cost.path or script, cost.line).finding(
        RULE.code,
        f"the step takes {format_seconds(cost.step_seconds)}, and {ready} with its batch already "
        f"there: the loader, {having}, costs {cost.price / cost.step_seconds:.0%}{because}",
        found.advice,
        count_per_step=cost.batches,
        price_ms=cost.price * 1e3,
    )


def _waited(profile: Profile, waited: float, step: float) -> Finding:
    cost = profile.loader
    workers = cost.settings.workers if cost else max(wait.workers for wait in profile.waits)
    pinned = "" if profile.device.startswith("cpu") else ", pin_memory=True"
    advice = (
        f"more than num_workers={workers}{pinned} while there are cores to run them; beyond that, "
        "make reading a sample cheaper: decode once and store, or transform batches on the device"
    )
    if workers == 0:
        # As many as read a batch in the time of the rest of the step.
        enough = max(ceil(waited / max(step - waited, 1e-9)), 1)
        most = max(cost.cores if cost else _MOST_WORKERS, 1)
        advice = (
            f"num_workers={min(enough, most)}, persistent_workers=True{pinned}: "
            "workers read the next batches while the step computes"
        )
    path = (cost.path if cost else "") or profile.script
    return CodeLine(path, cost.line if cost else 0).finding(
        RULE.code,
        f"the step waits {format_seconds(waited)} of {format_seconds(step)} "
        f"({waited / step:.0%}) for its data loader, which has {_count(workers)}",
        advice,
        count_per_step=max(len(profile.waits), 1),
        price_ms=waited * 1e3,
    )


def _count(workers: int) -> str:
    return f"{workers} worker{'s' * (workers != 1)}"


RULE = Rule(code="TT301", name="loader-dominates", check=check)
