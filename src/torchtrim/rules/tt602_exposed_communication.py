"""Collectives that nothing overlaps take a fifth of the step or more.

## What it does

Adds up the time that a rank only waited for collectives, after the last rank had reached them, and
reports it from a fifth of the step. The price is that time on the rank that waits longest.

Emulated devices are left out, since their ranks communicate through the host.

## Why is this bad?

Gradients exchanged while backward still computes others cost nothing. The exchanges left at the end
of backward, and every collective that the program waits for at once, lengthen the step.

## Example

```python
loss.backward()
for parameter in model.parameters():
    dist.all_reduce(parameter.grad)
    parameter.grad /= dist.get_world_size()
```

## Use instead

```python
model = DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=25)
loss.backward()
```

Smaller buckets start earlier, larger ones take less time together. If the recorded exchanges have
several sizes, the finding estimates the savings of other bucket sizes and of bfloat16 gradients,
modelled from a latency and a time for each byte. With gradient accumulation, exchange once a step
(TT604). A larger batch for each rank overlaps more.

## Fix safety

Over two ranks, the grouping of gradients into buckets does not change any sum. Over more ranks,
sums may be added in another order: rounding.

## References

* [DistributedDataParallel: internal design](https://pytorch.org/docs/stable/notes/ddp.html)
* Li et al., PyTorch Distributed: Experiences on Accelerating Data Parallel Training, VLDB 2020.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torchtrim.analysis.ranks import SHARE
from torchtrim.analysis.user_source import line_of
from torchtrim.core.units import format_bytes, format_seconds
from torchtrim.records.finding import Finding
from torchtrim.records.profile import Profile, is_emulated
from torchtrim.rules.base import Rule
from torchtrim.step.exchanges import MIB, overlap_of
from torchtrim.step.job import JobCollective, job_of


def across(profiles: Sequence[Profile]) -> Iterator[Finding]:
    """Yield one finding if collectives that nothing overlaps take a large part of the step."""
    if len(profiles) < 2 or is_emulated(profiles[0].device):
        return
    job = job_of(profiles)
    seconds, rank = max(
        (sum(_exposed(exchange, profile.rank) for exchange in job.exchanges), profile.rank)
        for profile in job.profiles
    )
    if seconds < SHARE * job.seconds:
        return
    own = next(profile for profile in job.profiles if profile.rank == rank)
    longest = max(job.exchanges, key=lambda exchange: _exposed(exchange, rank))
    operator = next(part.operator for part in longest.parts if part.rank == rank)
    count, total = len(job.exchanges), sum(exchange.bytes for exchange in job.exchanges)
    yield line_of(own, operator).finding(
        RULE.code,
        f"rank {rank} waits {format_seconds(seconds)} of {format_seconds(job.seconds)} "
        f"({seconds / job.seconds:.0%}) for {count} collective{'s' * (count != 1)} of "
        f"{format_bytes(total)} when it has nothing else to do",
        "have gradients exchanged while backward computes others, in buckets of another size, "
        f"and once a step{''.join(_each_brings(own))}",
        count_per_step=count,
        price_ms=seconds * 1e3,
    )


def _each_brings(profile: Profile) -> Iterator[str]:
    """Describe the savings of each alternative exchange, if the recorded step shows them."""
    for replica in profile.replicas:
        overlap = overlap_of(profile, replica)
        if overlap is None:
            continue
        cap, saved = overlap.best_cap()
        if saved > 0:
            yield f"; bucket_cap_mb={cap // MIB} hides {format_seconds(saved)} more"
        halved = overlap.exposed_now() - overlap.exposed_now(width=0.5)
        if halved > 0:
            yield f"; bfloat16 takes {format_seconds(halved)} less (--allow semantic=compress_gradients)"


def _exposed(exchange: JobCollective, rank: int) -> float:
    """Return how long a rank was blocked by one collective after all ranks had reached it."""
    return sum(part.blocked - exchange.waited(part) for part in exchange.parts if part.rank == rank)


RULE = Rule(code="TT602", name="exposed-communication", across=across)
