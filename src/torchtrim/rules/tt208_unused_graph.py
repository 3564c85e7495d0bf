"""A model runs with gradients enabled but without a backward: autograd keeps its activations needlessly.

## What it does

Finds model calls with gradients enabled that no backward of the step reaches, and the tensors they
keep. The price is the fall of the peak if each tensor were dropped after its last read. Savings below
2 % of the peak are not reported.

## Why is this bad?

While gradients are enabled, every operator keeps its saved tensors until the result is released.
That is most of the memory of training, spent on evaluation, on a teacher, or on a generator whose
output is detached.

## Example

```python
model.eval()
for batch, labels in validation:
    total += criterion(model(batch), labels)
```

## Use instead

```python
model.eval()
with torch.no_grad():
    for batch, labels in validation:
        total += criterion(model(batch), labels)
```

## Fix safety

Bitwise equal. `model.eval()` does not disable gradients, and `torch.no_grad()` does not disable
dropout: evaluation needs both.

## References

* [Locally disabling gradient computation](https://pytorch.org/docs/stable/notes/autograd.html#locally-disabling-gradient-computation)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from torchtrim.analysis.held import finding_at, freed, is_much, unused_graphs
from torchtrim.analysis.user_source import line_of
from torchtrim.core.units import format_bytes
from torchtrim.records.finding import Finding
from torchtrim.records.profile import Profile
from torchtrim.rules.base import Rule


def check(profile: Profile) -> Iterator[Finding]:
    """Yield one finding for each model that runs with gradients needlessly."""
    deaths: dict[str, dict[int, int]] = defaultdict(dict)
    first: dict[str, list[int]] = defaultdict(list)
    for call, kept in unused_graphs(profile).items():
        path = profile.modules[call.module].path
        deaths[path].update(kept)
        first[path].append(call.first)
    for path, kept in deaths.items():
        saved = freed(profile, kept)
        if is_much(profile, saved):
            late = (n for n, until in kept.items() if until < profile.storages[n].death)
            size = format_bytes(sum(profile.storages[n].counted for n in late))
            yield finding_at(
                RULE.code,
                line_of(profile, first[path][0]),
                saved,
                f"{path} runs with gradients, and no backward uses what autograd keeps "
                f"({size}), which raises the peak by {format_bytes(saved)}",
                "call it under torch.no_grad()",
                count=len(first[path]),
            )


RULE = Rule(code="TT208", name="unused-graph", check=check)
