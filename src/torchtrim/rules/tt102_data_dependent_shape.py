"""The shape of a result depends on values, so the host synchronizes to learn it.

## What it does

Finds operators whose output size depends on the data: `x[mask]`, `x[mask] = y`, `masked_select`,
`nonzero`, one-argument `where`, `unique`, `bincount`, and `repeat_interleave` without
`output_size=`. An operator in backward counts on the line of its forward. Steps on the CPU and
tensors in host memory are left out, as is `x[mask] = 0.0`: PyTorch fills it in without counting.
[The table of waits](../waits.md) has every case with its source.

## Why is this bad?

PyTorch allocates a result before the device computes it, and needs its shape for that. The host
blocks until the device has counted, and the step cannot be captured as a CUDA graph. Selecting by a
mask waits once in forward and once more in backward.

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

`nonzero_static(size=...)` and `repeat_interleave(..., output_size=...)` take a size that the
program knows. `zeros(n).scatter_add_(0, index, ones)` counts like `bincount` if `n` is known.

## Fix safety

Selecting elements by `torch.where` keeps their bits. A sum or mean over a full tensor with zeros
adds in another order than over the selected elements, so it is equal up to rounding. If the
elements left out may be infinite or NaN, put a harmless value in *before* the function, or its
gradient is NaN. An empty mask gives `0 / 0` in both forms. Random numbers drawn only for the
selected elements cannot be reproduced this way.

## References

* [torch.nonzero](https://pytorch.org/docs/stable/generated/torch.nonzero.html)
* [torch.nonzero_static](https://pytorch.org/docs/stable/generated/torch.nonzero_static.html)
* [torch.repeat_interleave](https://pytorch.org/docs/stable/generated/torch.repeat_interleave.html)
* [Performance tuning guide: avoid unnecessary CPU-GPU synchronization](https://pytorch.org/tutorials/recipes/recipes/tuning_guide.html)
"""

from __future__ import annotations

from torchtrim.rules.base import waiting

RULE = waiting(__name__, "TT102", "data-dependent-shape")
