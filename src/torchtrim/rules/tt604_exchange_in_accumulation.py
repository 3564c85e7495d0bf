"""Gradients are exchanged for each micro-batch of an accumulation.

## What it does

Compares the bytes that backward exchanges in a step with the bytes of the gradients, and reports where
gradients that are added up over several backwards go between the ranks more than once. The price is the
time for which a rank was blocked by all exchanges but the last.

## Why is this bad?

Only the sum of all micro-batches is needed. `DistributedDataParallel` cannot know which backward is the
last, and exchanges after each: with four micro-batches four times the bytes.

## Example

```python
for number, (inputs, labels) in enumerate(micro_batches):
    criterion(model(inputs), labels).backward()
optimizer.step()
```

## Use instead

```python
for number, (inputs, labels) in enumerate(micro_batches):
    last = number + 1 == len(micro_batches)
    with contextlib.nullcontext() if last else model.no_sync():
        criterion(model(inputs), labels).backward()
optimizer.step()
```

The forward too has to run inside `no_sync`.

## Fix safety

The ranks' sums are added once instead of micro-batch by micro-batch, so the order of additions is
another: rounding. Gradients are local until the last backward: clip and read them after it only.

## References

* [DistributedDataParallel.no_sync](https://pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html#torch.nn.parallel.DistributedDataParallel.no_sync)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torchtrim.records.finding import Finding, Suggestion
from torchtrim.records.profile import Collective, Profile
from torchtrim.rules.base import Rule
from torchtrim.rules.places import line_of
from torchtrim.step.job import blocked_seconds
from torchtrim.units import format_bytes

_REDUCES = "allreduce"


def check(profile: Profile) -> Iterator[Finding]:
    """One finding where a rank exchanges more than once what it adds up."""
    gradients = sum(replica.gradient_bytes for replica in profile.replicas)
    exchanged = [*_of_backward(profile)]
    total = sum(one.bytes for _, one in exchanged)
    rounds = round(total / gradients) if gradients else 0
    if rounds < 2 or _added(profile) < rounds:
        return
    blocked = blocked_seconds(profile)
    needless = [*_without_last(exchanged, gradients)]
    path, line = line_of(profile, min((call.first for call in profile.calls), default=-1))
    yield Finding(
        code=RULE.code,
        path=path,
        line=line,
        end_line=line,
        message=f"a step exchanges {format_bytes(total)} of gradients in {rounds} rounds, one for each "
        f"micro-batch, and {format_bytes(gradients)} would do",
        count_per_step=rounds - 1,
        price_ms=sum(blocked[number] for number in needless) * 1e3,
        fix=Suggestion(
            kind="advice",
            equivalence="ROUNDING",
            reason="run all micro-batches but the last inside `with model.no_sync():`",
        ),
    )


def across(profiles: Sequence[Profile]) -> Iterator[Finding]:
    """That of the first rank: all of them exchange the same."""
    yield from check(profiles[0])


def _of_backward(profile: Profile) -> Iterator[tuple[int, Collective]]:
    for number, one in enumerate(profile.collectives):
        if profile.operators[one.operator].phase == "backward" and one.name == _REDUCES:
            yield number, one


def _added(profile: Profile) -> int:
    """How often the step adds to a gradient, the most of all."""
    steps = profile.optimizer_steps
    return max((update.added for step in steps for update in step.updates), default=0)


def _without_last(exchanged: list[tuple[int, Collective]], gradients: int) -> Iterator[int]:
    """All exchanges but those of the last round."""
    left = sum(one.bytes for _, one in exchanged) - gradients
    for number, one in exchanged:
        if left <= 0:
            return
        left -= one.bytes
        yield number


RULE = Rule(code="TT604", name="exchange-in-accumulation", check=check, across=across)
