"""The other ranks wait for one rank that is late.

## What it does

Puts the steps of all ranks on one clock, finds the last rank to reach each collective, and measures
how long the others had nothing else to do until then. It reports a rank if another waits for it a
fifth of the step or more. The price is the longest such wait of any rank.

A rank that is late because it waited for its data is TT606.

## Why is this bad?

Every collective ends when the last rank arrives, so the whole job runs at the pace of its slowest
rank. A rank is late if it has more work: longer sequences, a validation or a log that it alone
writes, or a processor or GPU that it shares.

## Example

```python
for inputs, labels in loader:
    loss = criterion(model(inputs), labels)
    if dist.get_rank() == 0:
        log_histograms(model)
    loss.backward()
```

## Use instead

```python
for step, (inputs, labels) in enumerate(loader):
    loss = criterion(model(inputs), labels)
    if dist.get_rank() == 0 and step % 100 == 0:
        log_histograms(model)
    loss.backward()
```

If inputs differ in length, sort or bucket them so that ranks get batches of similar length in the
same step.

## Fix safety

Work on one rank only does not affect the gradients. Another order of samples is another training
run.

## References

* [DistributedDataParallel: internal design](https://pytorch.org/docs/stable/notes/ddp.html)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torchtrim.analysis.ranks import lags, slower_line
from torchtrim.core.units import format_seconds
from torchtrim.records.finding import Finding
from torchtrim.records.profile import Profile
from torchtrim.rules.base import Rule
from torchtrim.step.job import job_of


def across(profiles: Sequence[Profile]) -> Iterator[Finding]:
    """Yield one finding for each rank that others wait for."""
    job = job_of(profiles)
    for lag in lags(job) if len(profiles) > 1 else ():
        if lag.loading >= lag.seconds / 2:
            continue
        yield slower_line(job, lag.rank).finding(
            RULE.code,
            f"the other ranks wait {format_seconds(lag.seconds)} of "
            f"{format_seconds(job.seconds)} ({lag.seconds / job.seconds:.0%}) for rank "
            f"{lag.rank}, which arrives last",
            f"give rank {lag.rank} no more work than the others: it falls behind here",
            count_per_step=lag.times,
            price_ms=lag.seconds * 1e3,
        )


RULE = Rule(code="TT601", name="straggling-rank", across=across)
