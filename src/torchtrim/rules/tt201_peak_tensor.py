"""One tensor holds a fifth or more of the peak.

## What it does

Lists each activation, gradient, temporary or input that holds at least 20 % of the highest memory:
the operator and line that created it, and why it is still live there. Parameters, buffers and
optimizer state are always live and are left out. The price is the fall of the peak without the
tensor, which is less than its size if another moment of the step is nearly as high.

## Why is this bad?

If one tensor dominates the peak, one decision sets it: a batch size, a full table of logits, an
attention matrix, a result that a variable still holds. Only a change there lowers the peak.

## Example

```python
logits = head(hidden)
loss = F.cross_entropy(logits.float(), labels)
loss.backward()
```

## Use instead

```python
def part_loss(part, wanted):
    return F.cross_entropy(head(part).float(), wanted, reduction="sum")

losses = [
    checkpoint(part_loss, part, wanted, use_reentrant=False)
    for part, wanted in zip(hidden.chunk(8), labels.chunk(8))
]
loss = torch.stack(losses).sum() / labels.numel()
loss.backward()
```

`del` a result that backward does not need, split the batch into micro-batches, or recompute the
module that created it.

## Fix safety

Dropping a reference and recomputing are bitwise equal. Computing in chunks or micro-batches sums in
another order, which is equal up to rounding; with BatchNorm, micro-batches compute other
statistics.

## References

* [Understanding CUDA memory usage](https://pytorch.org/docs/stable/torch_cuda_memory.html)
* [torch.utils.checkpoint](https://pytorch.org/docs/stable/checkpoint.html)
"""

from __future__ import annotations

from collections.abc import Iterator

from torchtrim.analysis.timeline import alive, peak_operator, peak_without, timeline
from torchtrim.analysis.user_source import line_of
from torchtrim.analysis.why_live import why_alive
from torchtrim.core.units import format_bytes
from torchtrim.records.commands import fitting
from torchtrim.records.finding import Finding
from torchtrim.records.operator_names import word_of
from torchtrim.records.profile import ALWAYS, Profile
from torchtrim.rules.base import Rule

_SHARE = 0.2  # Arbitrary; as the documentation says.


def check(profile: Profile) -> Iterator[Finding]:
    """Yield one finding for each tensor that dominates the peak."""
    at = peak_operator(profile)
    peak = timeline(profile).high[at] if at >= 0 else 0
    large = [
        index
        for index in alive(profile, at)
        if profile.storages[index].kind not in ALWAYS
        and 0 < peak * _SHARE <= profile.storages[index].counted
    ]
    for index, why in why_alive(profile, large, at).items():
        yield _finding(profile, index, peak, why)


def _finding(profile: Profile, index: int, peak: int, why: str) -> Finding:
    storage = profile.storages[index]
    return line_of(profile, storage.birth).finding(
        RULE.code,
        f"one {storage.kind} of {format_bytes(storage.counted)} is "
        f"{storage.counted / peak:.0%} of the peak: {_maker(profile, index)}, {why}",
        _advice(profile, why),
        price_bytes=peak - peak_without(profile, [index]),
        source="modelled",
    )


def _maker(profile: Profile, index: int) -> str:
    storage = profile.storages[index]
    if storage.birth < 0:
        return f"{storage.name}, from before the step" if storage.name else "from before the step"
    module = profile.module_of(storage.birth)
    maker = f"created by {word_of(profile.operators[storage.birth].name)}"
    return f"{maker} in {module}" if module else maker


def _advice(profile: Profile, why: str) -> str:
    if "Python reference" in why:
        return (
            "del the last name that holds it before the peak, or detach and keep a smaller result"
        )
    return (
        "compute it in chunks, in a narrower type or in smaller micro-batches; "
        f"`{fitting(script=profile.script)}` looks for a plan"
    )


RULE = Rule(code="TT201", name="peak-owned-by-one-tensor", check=check)
