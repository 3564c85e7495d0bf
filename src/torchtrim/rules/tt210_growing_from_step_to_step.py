"""Something gets longer with every training step, so training ends when memory does.

## What it does

Lists each container (dict, list, set, a function's cache) that grew in every observed step, and
each variable whose tensor is attached to a growing graph. The price is the bytes that a step adds:
tensors, Python objects and, for entries that hold autograd graphs, at least the growth of the peak
from step to step. The finding points to the line that fills the container. A list of numbers costs
almost nothing and is not reported: a finding needs 2 % of the peak over a thousand steps, and a KiB
a step, unless it holds graphs. Graphs show in five steps or more (`--steps 3`, the default, with
one warm-up step and one recorded step), containers in six: a separate step, which counts in no
figure, finds the filling line.

## Why is this bad?

A loss that is kept as a tensor keeps its graph: the nodes of every operator of that step, and all
their saved tensors that backward has not released. `total = total + loss` builds one graph of all
steps. A cache by sample fills for an epoch, which is intended; a cache by step fills forever.

## Example

```python
losses = []
for batch in loader:
    loss = criterion(model(batch), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss)
```

## Use instead

```python
losses = []
for batch in loader:
    loss = criterion(model(batch), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.detach())
```

`loss.item()` synchronizes in every step; read the detached losses once, at the end of the epoch.
Limit a cache to its newest entries: `collections.deque(maxlen=n)`,
`functools.lru_cache(maxsize=n)`.

## Fix safety

`detach()` keeps the value and releases the graph: bitwise equal, unless something runs backward
through it later. Check yourself that nothing needs the entries that a limit drops.

## References

* [PyTorch FAQ: don't accumulate history across your training loop](https://pytorch.org/docs/stable/notes/faq.html)
"""

from __future__ import annotations

from collections.abc import Iterator

from torchtrim.analysis.user_source import line_of_growth
from torchtrim.core.units import format_bytes
from torchtrim.records.finding import Finding
from torchtrim.records.profile import Growth, Profile
from torchtrim.rules.base import Rule

_STEPS = 1000  # Arbitrary; a short training run.
_SHARE = 0.02  # As in analysis/held.py.
_LEAST = 1024  # Arbitrary; numbers of a log are smaller, tensors rarely.
_OF_GRAPHS = " of graphs"


def check(profile: Profile) -> Iterator[Finding]:
    """Yield one finding for each container or graph that grows significantly, or holds graphs."""
    if not profile.operators:
        return
    for growth in profile.growths:
        is_much = _STEPS * growth.bytes >= _SHARE * profile.peak_bytes
        if _is_graph(growth) or (is_much and growth.bytes >= _LEAST):
            line, inside = line_of_growth(profile, growth)
            yield line.finding(
                RULE.code,
                _message(growth) + inside,
                _advice(growth),
                equivalence="BITWISE" if _is_graph(growth) else None,
                count_per_step=max(round(growth.entries), 1),
                price_bytes=growth.bytes,
            )


def _is_graph(growth: Growth) -> bool:
    return growth.kind == "graph" or growth.kind.endswith(_OF_GRAPHS)


def _message(growth: Growth) -> str:
    more = f"{format_bytes(growth.bytes)} a step"
    if growth.kind == "graph":
        return f"the graph of {growth.name} grows by {growth.entries:g} operators and {more}"
    entries = f"{growth.entries:g} entr{'y' if growth.entries == 1 else 'ies'}"
    kind = growth.kind.removesuffix(_OF_GRAPHS)
    held = ", and its tensors hold their graphs" if _is_graph(growth) else ""
    return f"{kind} {growth.name} grows by {entries} and {more}{held}"


def _advice(growth: Growth) -> str:
    if _is_graph(growth):
        what = growth.name if growth.kind == "graph" else "the entry"
        return f"detach it: keep tensor.detach() where {what} is kept beyond the step"
    if growth.kind == "lru_cache":
        return "functools.lru_cache(maxsize=n) in place of maxsize=None"
    return "keep only the newest entries, such as in collections.deque(maxlen=n), or on disk"


RULE = Rule(code="TT210", name="grows-from-step-to-step", check=check)
