"""A copy of data from the host to the device blocks the host.

## What it does

Finds copies to the device that block: `.to("cuda")` and `.cuda()` of a tensor in ordinary
(pageable) memory, with `non_blocking=True` or without, or in pinned memory without it;
`torch.tensor(values, device="cuda")`; and implicit ones, such as indexing a device tensor by a list
or by a host tensor. Copies between tensors on the device do not block. [The table of
waits](../waits.md) has every case with its source.

## Why is this bad?

A blocking copy waits until the device has done all work queued before it, and then for the copy
itself. From pageable memory the driver first copies into its own buffer, so
`non_blocking=True` alone changes little: the host still blocks.

## Example

```python
for images, labels in DataLoader(dataset, batch_size=64):
    images, labels = images.to(device), labels.to(device)
    weights = torch.tensor([0.2, 0.8], device=device)
```

## Use instead

```python
weights = torch.tensor([0.2, 0.8], device=device)
for images, labels in DataLoader(dataset, batch_size=64, pin_memory=True):
    images = images.to(device, non_blocking=True)
    labels = labels.to(device, non_blocking=True)
```

Put constants into `register_buffer`, so that they move with their module. `torch.full`,
`torch.zeros` and `torch.arange` create a tensor on the device without a copy.

## Fix safety

The values are the same. Do not write to a pinned tensor while its copy is in progress, and do not
read a copy *to the host* with `non_blocking=True` before an event shows that it has arrived
([TT105](tt105_unsynchronized_copy.md)).

## References

* [CUDA semantics: use pinned memory buffers](https://pytorch.org/docs/stable/notes/cuda.html#use-pinned-memory-buffers)
* [A guide on good usage of non_blocking and pin_memory()](https://pytorch.org/tutorials/intermediate/pinmem_nonblock.html)
"""

from __future__ import annotations

from torchtrim.rules.base import waiting

RULE = waiting(__name__, "TT103", "blocking-upload")
