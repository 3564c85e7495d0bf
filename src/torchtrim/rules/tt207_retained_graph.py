"""Backward keeps the graph, and nothing uses it again.

## What it does

Finds steps whose saved tensors are mostly still live after backward has used them, without a second
backward that needs them. The price is the fall of the peak if each tensor were dropped when backward
used it, leftovers of the previous step included. Savings below 2 % of the peak are not reported.

## Why is this bad?

Backward frees activations as it proceeds, and that makes room for gradients. With
`retain_graph=True` all of them stay until the loss is released, often through the next forward,
beside its activations.

## Example

```python
loss.backward(retain_graph=True)
```

## Use instead

```python
loss.backward()
```

If two losses share a graph, `(one + two).backward()` runs through it once.

## Fix safety

Bitwise equal. If something does need the graph again, PyTorch raises "Trying to backward through
the graph a second time"; it never computes wrong results.

## References

* [torch.autograd.backward](https://pytorch.org/docs/stable/generated/torch.autograd.backward.html)
"""

from __future__ import annotations

from collections.abc import Iterator

from torchtrim.analysis.held import finding_at, freed, is_much, named, retained
from torchtrim.analysis.user_source import line_of
from torchtrim.core.units import format_bytes
from torchtrim.records.finding import Finding
from torchtrim.records.profile import Profile
from torchtrim.rules.base import Rule


def check(profile: Profile) -> Iterator[Finding]:
    """Yield one finding for the step."""
    kept = retained(profile)
    if not kept:
        return
    held = {n: death for deaths in named(profile).values() for n, death in deaths.items()}
    saved = freed(profile, {**held, **kept})
    if is_much(profile, saved):
        size = format_bytes(sum(profile.storages[n].counted for n in kept))
        yield finding_at(
            RULE.code,
            line_of(profile, _loss(profile)),
            saved,
            f"backward keeps the graph: {size} of activations stay after it has used them, "
            f"which raises the peak by {format_bytes(saved)}",
            "call backward() without retain_graph=True",
            count=len(kept),
        )


def _loss(profile: Profile) -> int:
    of = (op.forward for op in profile.operators if op.phase == "backward" and op.forward >= 0)
    return next(of, -1)


RULE = Rule(code="TT207", name="retained-graph", check=check)
