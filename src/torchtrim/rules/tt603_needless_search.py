"""`find_unused_parameters=True`, and every parameter is used.

## What it does

Looks at each `DistributedDataParallel` that was made with `find_unused_parameters=True` and reports it
where in none of the steps that were watched, on no rank, a parameter was without a part in the loss.

## Why is this bad?

After each forward the whole graph is walked on the host, before backward may begin, and ranks exchange
a map of what they used. It is work in every step for nothing.

## Example

```python
model = DistributedDataParallel(model, find_unused_parameters=True)
```

## Use instead

```python
model = DistributedDataParallel(model)
```

## Fix safety

Where another batch leaves parameters out, by a branch in forward, backward of the next step then raises
an error that names them. Only the steps that were watched are known.

## References

* [DistributedDataParallel](https://pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torchtrim.analysis.ranks import line_with
from torchtrim.records.finding import Finding, Suggestion
from torchtrim.records.profile import Profile
from torchtrim.rules.base import Rule


def check(profile: Profile) -> Iterator[Finding]:
    """What one rank shows."""
    yield from across((profile,))


def across(profiles: Sequence[Profile]) -> Iterator[Finding]:
    """One finding for each replica that searches and never finds."""
    first = profiles[0]
    for replica in first.replicas:
        unused = max(
            (o.unused_bytes for p in profiles for o in p.replicas if o.module == replica.module),
            default=0,
        )
        if unused or not replica.find_unused:
            continue
        path, line = line_with(first, "find_unused_parameters")
        yield Finding(
            code=RULE.code,
            path=path,
            line=line,
            end_line=line,
            message=f"`{first.modules[replica.module].path}` searches for unused parameters in every step, "
            f"and on {len(profiles)} ranks all of them were used",
            count_per_step=1,
            fix=Suggestion(
                kind="advice",
                equivalence="BITWISE",
                reason="leave find_unused_parameters out; if a step ever does not use one, backward says so",
            ),
        )


RULE = Rule(code="TT603", name="needless-search-for-unused", check=check, across=across)
