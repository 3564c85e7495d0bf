"""Gradients are exchanged for each micro-batch of an accumulation.

## What it does

Compares the bytes that backward exchanges in a step with the bytes of the gradients, and reports
gradients that are accumulated over several backwards and exchanged more than once. The price is the
time that a rank was blocked by all exchanges but the last.

## Why is this bad?

Only the sum of all micro-batches is needed. `DistributedDataParallel` cannot know which backward is
the last, and exchanges after each: with four micro-batches, four times the bytes.

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

The forward too must run inside `no_sync`.

## Fix safety

The ranks' sums are added once instead of micro-batch by micro-batch, in another order: rounding.
Gradients are local until the last backward: clip and read them only after it.

## References

* [DistributedDataParallel.no_sync](https://pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html#torch.nn.parallel.DistributedDataParallel.no_sync)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torchtrim.analysis.user_source import line_of
from torchtrim.core.units import format_bytes
from torchtrim.records.finding import Finding
from torchtrim.records.profile import Profile
from torchtrim.rules.base import Rule
from torchtrim.step.exchanges import rounds_of


def across(profiles: Sequence[Profile]) -> Iterator[Finding]:
    """Yield one finding if a rank exchanges accumulated gradients more than once."""
    profile = profiles[0]  # All ranks exchange the same.
    rounds = rounds_of(profile)
    if rounds.rounds < 2:
        return
    yield line_of(profile, min((call.first for call in profile.calls), default=-1)).finding(
        RULE.code,
        f"a step exchanges {format_bytes(rounds.all_bytes)} of gradients in {rounds.rounds} rounds, "
        f"one for each micro-batch, and {format_bytes(rounds.once_bytes)} would be enough",
        "run all micro-batches but the last inside `with model.no_sync():`",
        equivalence="ROUNDING",
        count_per_step=rounds.rounds - 1,
        price_ms=rounds.needless_seconds * 1e3,
    )


RULE = Rule(code="TT604", name="exchange-in-accumulation", across=across)
