"""The shape of a result depends on values, so the host waits for the device to learn it.

## What it does

Finds operators whose output has as many elements as the data say: `x[mask]`, `x[mask] = y`,
`masked_select`, `nonzero`, one-argument `where`, `unique`, `bincount`, and `repeat_interleave`
with a tensor of repeats. Those that backward runs are counted on the line of their forward. A
step on the CPU, and tensors in the host's memory, are left out, as is `x[mask] = 0.0`: PyTorch
fills it in without counting. Whether `repeat_interleave` was given `output_size=`, with which it
does not wait, a profile cannot tell: look at the line.

## Why is this bad?

PyTorch allocates a result before the device computes it, and for that it must know the shape. The
host stands still until the device has counted, and the step cannot be captured as a CUDA graph.
Selecting by a mask waits once in forward and once more in backward.

## Example

```python
valid = labels != ignore
loss = criterion(logits[valid], labels[valid]).mean()
classes = labels.unique().numel()
```

## Use instead

```python
valid = labels != ignore
losses = criterion(logits, labels.where(valid, 0))
loss = losses.where(valid, 0).sum() / valid.sum()
ordered = labels.sort().values
classes = (ordered[1:] != ordered[:-1]).sum() + 1
```

`nonzero_static(size=...)` and `repeat_interleave(..., output_size=...)` take the size that the
program knows. `zeros(n).scatter_add_(0, index, ones)` counts like `bincount` when `n` is known.

## Cure safety

Selecting elements by `torch.where` keeps their bits. A sum or mean over a full tensor with zeros
adds in another order than over the selected elements, so it is equal up to rounding. Where the
elements left out may be infinite or not a number, put a harmless value in *before* the function,
or its gradient is not a number. An empty mask gives `0 / 0` in both forms. Random numbers drawn
for the selected elements alone cannot be reproduced this way.

## References

* [torch.nonzero](https://pytorch.org/docs/stable/generated/torch.nonzero.html)
* [torch.nonzero_static](https://pytorch.org/docs/stable/generated/torch.nonzero_static.html)
* [torch.repeat_interleave](https://pytorch.org/docs/stable/generated/torch.repeat_interleave.html)
* [Performance tuning guide: avoid unnecessary CPU-GPU synchronization](https://pytorch.org/tutorials/recipes/recipes/tuning_guide.html)
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from torchtrim.memory.names import base_name
from torchtrim.records.finding import Finding
from torchtrim.records.profile import Operator, Profile
from torchtrim.rules.base import Rule
from torchtrim.rules.waits import on_host, waiting_finding, waiting_lines

_UNIQUE = (
    "sort and compare neighbours, (s[1:] != s[:-1]); or count into zeros(n) with scatter_add_ "
    "where the range is known"
)
_MASK = (
    "keep the shape: select with torch.where(mask, x, fill), and reduce with weights that are zero "
    "where the mask is false"
)
_ADVICE = {
    "aten::nonzero": f"{_MASK}; nonzero_static(size=...) where the count is known",
    "aten::_unique": _UNIQUE,
    "aten::_unique2": _UNIQUE,
    "aten::unique_dim": _UNIQUE,
    "aten::unique_consecutive": _UNIQUE,
    "aten::unique_dim_consecutive": _UNIQUE,
    "aten::masked_select": _MASK,
    "aten::bincount": "count into zeros(n) with scatter_add_ where the range is known",
    "aten::repeat_interleave": "pass output_size=, with which there is no wait",
}
_KNOWN_REPEATS = "aten::repeat_interleave.self_int"
_MASKS = frozenset(("bool", "uint8"))
_GETS = frozenset(("aten::index", "aten::_unsafe_index"))
_PUTS = frozenset(
    ("aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index_put")
)


def check(profile: Profile) -> Iterator[Finding]:
    """One finding for each line that makes a shape from data."""
    for line, operators in waiting_lines(profile, _counts):
        first = base_name(profile.operators[operators[0]].name)
        yield waiting_finding(
            profile,
            RULE.code,
            line,
            operators,
            what="a shape depends on the data",
            advice=_ADVICE.get(first, _MASK),
        )


def _counts(profile: Profile, op: Operator) -> bool:
    """Whether the host waits for a count. The first input is what is counted or indexed."""
    if not op.inputs or on_host(profile, op.inputs[0]):
        return False
    name = base_name(op.name)
    if name in _GETS:
        return any(use.dtype in _MASKS for use in op.inputs[1:])
    if name in _PUTS:
        return any(use.dtype in _MASKS for use in op.inputs[1:-1]) and not _fills(profile, op)
    return name in _ADVICE and op.name != _KNOWN_REPEATS


def _fills(profile: Profile, op: Operator) -> bool:
    """`x[mask] = 0.0`: one mask, one value from the host. PyTorch does it as `masked_fill_`."""
    value = op.inputs[-1]
    return len(op.inputs) == 3 and prod(value.shape) == 1 and on_host(profile, value)


RULE = Rule(code="TT102", name="data-dependent-shape", check=check)
