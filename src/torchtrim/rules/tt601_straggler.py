"""The other ranks await one that comes later.

## What it does

Puts the steps of all ranks on one clock and looks at who comes last to each collective, and at how
long the others had nothing else to do until then. It reports a rank for which another waits a fifth of
the step or more. The price is that wait, of the rank that waits most.

Where the late rank was late since it waited for its data, that is TT606.

## Why is this bad?

Every collective ends when the last rank has come, so the whole job goes at the pace of its slowest
rank. A rank is late where it has more to do: longer sequences, a validation or a log that only it
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

Where inputs differ in length, sort or bucket them so that ranks get batches of like length in the
same step.

## Fix safety

What only one rank does has no part in the gradients. Another order of samples is another training run.

## References

* [DistributedDataParallel: internal design](https://pytorch.org/docs/stable/notes/ddp.html)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torchtrim.analysis.ranks import lags, slower_line
from torchtrim.core.units import format_seconds
from torchtrim.records.finding import Finding, Suggestion
from torchtrim.records.profile import Profile
from torchtrim.rules.base import Rule
from torchtrim.step.job import job_of


def check(profile: Profile) -> Iterator[Finding]:
    """Nothing: it takes several ranks."""
    yield from across((profile,))


def across(profiles: Sequence[Profile]) -> Iterator[Finding]:
    """One finding for each rank that others await."""
    job = job_of(profiles)
    for lag in lags(job) if len(profiles) > 1 else ():
        if lag.loading >= lag.seconds / 2:
            continue
        path, line = slower_line(job, lag.rank)
        yield Finding(
            code=RULE.code,
            path=path,
            line=line,
            end_line=line,
            message=f"the other ranks wait {format_seconds(lag.seconds)} of "
            f"{format_seconds(job.seconds)} ({lag.seconds / job.seconds:.0%}) for rank {lag.rank}, which "
            "comes last",
            count_per_step=lag.times,
            price_ms=lag.seconds * 1e3,
            fix=Suggestion(
                kind="advice",
                reason=f"give rank {lag.rank} no more to do than the others: it falls behind here",
            ),
        )


RULE = Rule(code="TT601", name="straggling-rank", check=check, across=across)
