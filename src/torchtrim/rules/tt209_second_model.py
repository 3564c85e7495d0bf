"""A second copy of the model is on the device at the peak: an average of its weights, or a reference.

## What it does

Finds tensors that a step writes from the parameters after the optimizer has stepped, such as an
exponential moving average, and models that run without gradients and are as large as the trained
one. The price is the fall of the peak without them. Savings below 2 % of the peak are not reported.

## Why is this bad?

An average of the weights is read and written once a step, but stays on the device all the time. A
frozen reference returns the same numbers for the same sample in each epoch.

## Example

```python
ema = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999))
```

## Use instead

```python
ema = torch.optim.swa_utils.AveragedModel(model, device="cpu", multi_avg_fn=get_ema_multi_avg_fn(0.999))
```

The average is then updated on the host; every tenth step, with the decay to the power of ten, is
often enough. Compute a reference's outputs once, before training, and keep those.

## Fix safety

The host may round an average differently. A reference's outputs are the same only for the same
inputs, so not if samples are augmented at random.

## References

* [torch.optim.swa_utils.AveragedModel](https://pytorch.org/docs/stable/generated/torch.optim.swa_utils.AveragedModel.html)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torchtrim.analysis.held import averages, finding_at, freed, is_much, references
from torchtrim.analysis.user_source import line_of
from torchtrim.core.units import format_bytes
from torchtrim.records.finding import Finding
from torchtrim.records.profile import Profile
from torchtrim.rules.base import Rule


def check(profile: Profile) -> Iterator[Finding]:
    """Yield one finding for averages, and one for a reference."""
    yield from _found(
        profile,
        averages(profile),
        "an average of the parameters",
        "keep it on the host, for example with device='cpu', and update it there",
    )
    yield from _found(
        profile,
        references(profile),
        "a model that is not trained",
        "compute its outputs once, before training, or keep it on the host between its calls",
    )


def _found(profile: Profile, storages: Sequence[int], what: str, advice: str) -> Iterator[Finding]:
    saved = freed(profile, dict.fromkeys(storages, 0))
    if storages and is_much(profile, saved):
        size = format_bytes(sum(profile.storages[n].counted for n in storages))
        yield finding_at(
            RULE.code,
            line_of(profile, _user(profile, frozenset(storages))),
            saved,
            f"{what} ({size}) is on the device at the peak, and raises it by {format_bytes(saved)}",
            advice,
            equivalence="ROUNDING",
        )


def _user(profile: Profile, storages: frozenset[int]) -> int:
    for index, op in enumerate(profile.operators):
        if storages.intersection((*op.mutates, *(use.storage for use in op.inputs))):
            return index
    return -1


RULE = Rule(code="TT209", name="second-model", check=check)
