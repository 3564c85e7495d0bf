"""A tensor's value is read on the host, which waits until the device has finished all queued work.

## What it does

Finds code that passes a tensor's value to Python: `.item()`, `float(t)`, `if t:`, `range(t)`,
`x[:t]`, `print(t)`, `torch.equal`, `torch.allclose`, and on a device also `.cpu()`, `.numpy()` and
`.tolist()`. Tensors in host memory, and steps that run on the CPU, do not synchronize and are left
out. The finding counts reads per line and step. On a real device the price is the time spent in
them. [The table of waits](../waits.md) has every case with its source.

## Why is this bad?

A device runs behind the host: the host queues work and continues. A value can only be read once
everything queued before it has run, so the host blocks, and then the device is idle while the host
queues again. Within one step many reads cost about as much as the first, because the wait moves to
the next one: remove them together and measure.

## Example

```python
for batch in loader:
    loss = train(batch)
    total += loss.item()
    if torch.isnan(loss):
        raise ValueError("loss is not a number")
```

## Use instead

```python
total = torch.zeros((), device=device)
for index, batch in enumerate(loader):
    loss = train(batch)
    total += loss.detach()
    if index % 100 == 0 and not math.isfinite(total.item()):
        raise ValueError("loss is not a number")
```

To choose between two tensors by a value, use `torch.where` on the device. To read several values,
`torch.stack(values).tolist()` waits once.

## Fix safety

Reading later changes when a value is seen, not the results, as long as the step does not depend on
it. A read that decides which code runs cannot be removed without changing the program. A copy to
the host with `non_blocking=True` alone does not fix it: its result must not be read before an event
shows that it has arrived.

## References

* [CUDA semantics: asynchronous execution](https://pytorch.org/docs/stable/notes/cuda.html#asynchronous-execution)
* [Performance tuning guide: avoid unnecessary CPU-GPU synchronization](https://pytorch.org/tutorials/recipes/recipes/tuning_guide.html)
"""

from __future__ import annotations

from torchtrim.rules.base import waiting

RULE = waiting(__name__, "TT101", "value-read-on-host")
