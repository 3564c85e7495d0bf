"""Loader waits take a fifth of the step's time or more.

## What it does

Adds up the time in which the step asked its `DataLoader` for a batch and had none, and reports it
from 20 % of the step. The price is that time, the most that a faster loader can save.

## Why is this bad?

During a loader wait nothing is computed. With `num_workers=0`, the default, every
batch is read, decoded and collated between two steps, in the process that trains.

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

`pin_memory=True` with `non_blocking=True` is for a CUDA device. Where more workers do not help,
the data set itself is too slow: decode once and store, read larger pieces, transform batches on
the device.

## Fix safety

Workers fetch the same samples in the same order. Random transforms draw from each worker's own
generator, so their numbers differ from those of `num_workers=0` and from those of another number
of workers: the step computes the same function of other random numbers. Workers need memory of
their own, and a main guard where processes are spawned.

## References

* [torch.utils.data: single- and multi-process data loading](https://pytorch.org/docs/stable/data.html#single-and-multi-process-data-loading)
* [Performance tuning guide: asynchronous data loading](https://pytorch.org/tutorials/recipes/recipes/tuning_guide.html)
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil

from torchtrim.records.finding import Finding, Suggestion
from torchtrim.records.profile import Profile
from torchtrim.rules.base import Rule
from torchtrim.units import format_seconds

_SHARE = 0.2


def check(profile: Profile) -> Iterator[Finding]:
    """One finding where loader waits take a large part of the step."""
    waited = sum(wait.seconds for wait in profile.waits)
    if not 0 < profile.step_seconds * _SHARE <= waited:
        return
    yield Finding(
        code=RULE.code,
        path=profile.script,
        line=0,
        end_line=0,
        message=f"the step waits {format_seconds(waited)} of "
        f"{format_seconds(profile.step_seconds)} ({min(waited / profile.step_seconds, 1):.0%}) "
        f"for its data loader, which has {_workers(profile)} worker"
        f"{'s' * (_workers(profile) != 1)}",
        count_per_step=len(profile.waits),
        price_ms=waited * 1e3,
        fix=Suggestion(kind="advice", reason=_advice(profile, waited)),
    )


def _workers(profile: Profile) -> int:
    return max(wait.workers for wait in profile.waits)


def _advice(profile: Profile, waited: float) -> str:
    pinned = "" if profile.device.startswith("cpu") else ", pin_memory=True"
    workers = _workers(profile)
    if workers == 0:
        return (
            f"num_workers={_enough(profile, waited)}, persistent_workers=True{pinned}: "
            "workers read the next batches while the step computes"
        )
    return (
        f"more than num_workers={workers}{pinned} while there are cores to run them; beyond that, "
        "make reading a sample cheaper: decode once and store, or transform batches on the device"
    )


def _enough(profile: Profile, waited: float) -> int:
    """Workers that read a batch in the time that the rest of the step takes; 1 to 8."""
    computing = max(profile.step_seconds - waited, 1e-9)
    return min(max(ceil(waited / computing), 1), 8)


RULE = Rule(code="TT301", name="loader-dominates", check=check)
