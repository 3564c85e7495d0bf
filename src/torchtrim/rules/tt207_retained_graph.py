"""Backward keeps the graph, and nothing asks for it again.

## What it does

Finds steps in which most of what autograd saved is still alive after backward has used it, while no second
backward asks for it. The price is by how much the peak would be lower if each were dropped when it was used,
what is left of the step before included. Nothing is reported below 2 % of the peak.

## Why is this bad?

Backward frees activations as it goes, and that is what makes room for gradients. With `retain_graph=True` all
of them stay until the loss is gone, often through the next forward, beside the activations of that.

## Example

```python
loss.backward(retain_graph=True)
```

## Use instead

```python
loss.backward()
```

Where two losses share a graph, `(one + two).backward()` goes through it once.

## Fix safety

Bitwise equal. If something does need the graph again, PyTorch raises "Trying to backward through the graph a
second time", and nothing is computed wrongly.

## References

* [torch.autograd.backward](https://pytorch.org/docs/stable/generated/torch.autograd.backward.html)
"""

from __future__ import annotations

from collections.abc import Iterator

from torchtrim.analysis.held import freed, named, retained
from torchtrim.analysis.kept import finding_at, is_much
from torchtrim.analysis.places import line_of
from torchtrim.core.units import format_bytes
from torchtrim.records.finding import Finding
from torchtrim.records.profile import Profile
from torchtrim.rules.base import Rule


def check(profile: Profile) -> Iterator[Finding]:
    """One finding for the step."""
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
            f"backward keeps the graph: {size} of activations stay after it has used them; the peak is "
            f"{format_bytes(saved)} higher for it",
            "call backward() without retain_graph=True",
            count=len(kept),
        )


def _loss(profile: Profile) -> int:
    """The operator whose gradient backward computes first."""
    of = (op.forward for op in profile.operators if op.phase == "backward" and op.forward >= 0)
    return next(of, -1)


RULE = Rule(code="TT207", name="retained-graph", check=check)
