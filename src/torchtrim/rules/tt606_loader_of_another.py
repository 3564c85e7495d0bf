"""The other ranks wait for the data loader of one rank.

## What it does

Like TT601, for a rank that is late because it waited for its own `DataLoader`, during at least half
of the time that the others waited for it. The price is that time.

## Why is this bad?

The loader of one rank delays all of them. Its data may be on a slower disk, its samples may be
larger, its workers may have fewer cores; or one rank decodes for all and distributes the data.

## Example

```python
loader = DataLoader(dataset, batch_size=64, sampler=DistributedSampler(dataset))
```

## Use instead

```python
loader = DataLoader(
    dataset,
    batch_size=64,
    sampler=DistributedSampler(dataset),
    num_workers=4,
    prefetch_factor=4,
    persistent_workers=True,
)
```

Prefetching hides a slow batch. If the same rank is always slow, check where its data are stored and
what else runs there.

## Fix safety

Workers fetch the same samples in the same order. Random transforms draw from each worker's own
generator, so their numbers differ.

## References

* [torch.utils.data: multi-process data loading](https://pytorch.org/docs/stable/data.html#multi-process-data-loading)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torchtrim.analysis.ranks import lags
from torchtrim.analysis.user_source import CodeLine
from torchtrim.core.units import format_seconds
from torchtrim.records.finding import Finding
from torchtrim.records.profile import Profile
from torchtrim.rules.base import Rule
from torchtrim.step.job import job_of


def across(profiles: Sequence[Profile]) -> Iterator[Finding]:
    """Yield one finding for each rank whose loader the others wait for."""
    job = job_of(profiles)
    for lag in lags(job) if len(profiles) > 1 else ():
        if lag.loading < lag.seconds / 2:
            continue
        yield CodeLine(profiles[0].script, 0).finding(
            RULE.code,
            f"the other ranks wait {format_seconds(lag.seconds)} of "
            f"{format_seconds(job.seconds)} ({lag.seconds / job.seconds:.0%}) for the data loader of rank "
            f"{lag.rank}",
            f"have the loader of rank {lag.rank} read ahead: more workers, a larger "
            "prefetch_factor; or give it data that are as fast to read as the others'",
            count_per_step=lag.times,
            price_ms=lag.seconds * 1e3,
        )


RULE = Rule(code="TT606", name="loader-of-another-rank", across=across)
