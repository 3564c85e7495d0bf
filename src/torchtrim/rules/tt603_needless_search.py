"""`find_unused_parameters=True`, and every parameter is used.

## What it does

Looks at each `DistributedDataParallel` created with `find_unused_parameters=True` and reports it if
every parameter contributed to the loss in all observed steps, on all ranks.

## Why is this bad?

After each forward the host walks the whole graph before backward may begin, and ranks exchange a
map of the parameters that they used. This is wasted work in every step.

## Example

```python
model = DistributedDataParallel(model, find_unused_parameters=True)
```

## Use instead

```python
model = DistributedDataParallel(model)
```

## Fix safety

If another batch leaves parameters out, by a branch in forward, backward of the next step raises an
error that names them. The rule only knows the observed steps.

## References

* [DistributedDataParallel](https://pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torchtrim.analysis.ranks import line_with
from torchtrim.records.finding import Finding
from torchtrim.records.profile import Profile
from torchtrim.rules.base import Rule


def across(profiles: Sequence[Profile]) -> Iterator[Finding]:
    """Yield one finding for each replica that searches and never finds unused parameters."""
    first = profiles[0]
    for replica in first.replicas:
        same = (one for p in profiles for one in p.replicas if one.module == replica.module)
        if replica.find_unused and not any(one.unused_bytes for one in same):
            yield line_with(first, "find_unused_parameters").finding(
                RULE.code,
                f"`{first.modules[replica.module].path}` searches for unused parameters in every step, "
                f"and on {len(profiles)} ranks all of them were used",
                "omit find_unused_parameters; if a step leaves one unused, backward raises an error",
                equivalence="BITWISE",
            )


RULE = Rule(code="TT603", name="needless-search-for-unused", across=across)
