"""Batches are copied in wider types than their values need.

## What it does

Looks at one batch of the loader. If narrower types hold the same values bit for bit, such as
`uint8` for images decoded from bytes and converted to floats, half of the bytes or more need not be
copied. The price is the time to copy the excess from the host to the device, at the link's
bandwidth.

## Why is this bad?

An image as `float32` takes four times the bytes that were decoded. A worker writes them; then they
are handed over, pinned and copied, and the copy keeps a link busy that gradients or offloaded
tensors may need.

## Example

```python
transform = Compose([ToTensor(), Normalize(mean, std)])
for images, labels in loader:
    images = images.to(device)
```

## Use instead

```python
for images, labels in torchtrim.data.narrow(loader):
    images = images.to(device, non_blocking=True)
    images = (images - mean) / std
```

Or let the data set return the decoded bytes, and convert them after `.to(device)`.

## Fix safety

`narrow` keeps every bit: it checks every batch and packs a tensor only if unpacking restores it. By
hand, `.float()` is exact, but `.div(255)` is not on a CUDA device, which multiplies by the inverse:
the results may differ in the last bit from those of `ToTensor`. Values normalized on the host do
not count as narrow; normalizing them on the device may round differently.

## References

* [Performance tuning guide](https://pytorch.org/tutorials/recipes/recipes/tuning_guide.html)
* [A guide on pin_memory and non_blocking](https://pytorch.org/tutorials/intermediate/pinmem_nonblock.html)
"""

from __future__ import annotations

from collections.abc import Iterator

from torchtrim.analysis.prices import device_of
from torchtrim.analysis.user_source import CodeLine
from torchtrim.core.units import format_bytes
from torchtrim.records.finding import Finding
from torchtrim.records.profile import Profile
from torchtrim.rules.base import Rule

_LEAST = 2**20  # Arbitrary; copying a mebibyte takes less than a tenth of a millisecond.


def check(profile: Profile) -> Iterator[Finding]:
    """Yield one finding if half of a batch's bytes or more, and a mebibyte, need not be copied."""
    cost = profile.loader
    if cost is None or cost.parts is None or profile.device.startswith("cpu"):
        return
    parts = cost.parts
    saved = (parts.bytes - parts.narrow_bytes) * cost.batches
    if saved < _LEAST or 2 * parts.narrow_bytes > parts.bytes:
        return
    yield CodeLine(cost.path or profile.script, cost.line).finding(
        RULE.code,
        f"a batch ships {format_bytes(parts.bytes)}, and {format_bytes(parts.narrow_bytes)} hold "
        f"the same values: {', '.join(parts.narrow)}",
        "torchtrim.data.narrow(loader): batches are shipped narrow and widened on the device; or "
        "have the data set return the decoded bytes, and convert after `.to(device)`",
        equivalence="BITWISE",
        count_per_step=cost.batches,
        price_ms=saved / device_of(profile).link * 1e3,
        source="modelled",
    )


RULE = Rule(code="TT302", name="wide-inputs", check=check)
