"""The caching allocator reserves memory that the step cannot use.

## What it does

Replays the step's allocations through a model of PyTorch's CUDA caching allocator, twice in a row, with its
default settings and with others. The price is what another setting reserves less. Savings below 2 % of the
reserved bytes are not reported.

## Why is this bad?

The allocator takes memory from the driver in segments and cuts them. A piece that is too small for the
next request stays reserved, and an allocation can fail although enough bytes are free.

## Example

```python
for size in (1000, 2000, 3000):  # no freed segment has room for the next activations
    model(images[:size]).sum().backward()
```

## Use instead

```python
os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"  # before the first use of the device
```

Or set it in the shell: `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True python train.py`.

## Fix safety

The results are the same. Expandable segments do not exist on Windows, and memory that other processes
map (`torch.multiprocessing` with CUDA tensors) may not allow them.

## References

* [Memory management](https://docs.pytorch.org/docs/stable/notes/cuda.html#memory-management), its section on
  `PYTORCH_CUDA_ALLOC_CONF`
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from torchtrim.analysis.held import finding_at, is_much
from torchtrim.analysis.user_source import CodeLine
from torchtrim.core.units import format_bytes
from torchtrim.memory.caching import CachingAllocator
from torchtrim.memory.settings import AllocatorSettings, parse_settings
from torchtrim.records.finding import Finding
from torchtrim.records.profile import Profile
from torchtrim.rules.base import Rule

_TRIED = ("expandable_segments:True", "roundup_power2_divisions:8", "max_split_size_mb:128")
_ROUNDS = 2  # The first step fills an empty cache; later ones find what it left.


class _Request(NamedTuple):
    """An allocation, and the operator before which it is freed."""

    size: int
    death: int


def check(profile: Profile) -> Iterator[Finding]:
    """Yield one finding, with the setting that reserves least."""
    if profile.reserved_bytes is None:
        return
    requests = _requests(profile)
    plain = _replayed(requests, AllocatorSettings(), len(profile.operators))
    reserved = min(plain.peak_reserved, profile.reserved_bytes)
    if not is_much(profile, reserved - plain.peak_allocated):
        return
    tried = {
        words: _replayed(requests, parse_settings(words), len(profile.operators)).peak_reserved
        for words in _TRIED
    }
    best = min(tried, key=lambda words: tried[words])
    if is_much(profile, reserved - tried[best]):
        yield finding_at(
            RULE.code,
            CodeLine(profile.script, 0),
            reserved - tried[best],
            f"{format_bytes(reserved)} is reserved for a peak of {format_bytes(plain.peak_allocated)}; "
            f"with {best} it would be {format_bytes(tried[best])}",
            f"set PYTORCH_CUDA_ALLOC_CONF={best} before the script starts",
        )


def _requests(profile: Profile) -> dict[int, list[_Request]]:
    """Return the device's allocations by the operator that makes them; -1: before the step."""
    found: dict[int, list[_Request]] = defaultdict(list)
    for storage in profile.storages:
        if storage.counted:
            found[storage.birth].append(_Request(storage.bytes, storage.death))
    return found


def _replayed(
    requests: dict[int, list[_Request]], settings: AllocatorSettings, count: int
) -> CachingAllocator:
    """Run the step in a row. The next step begins with the blocks that outlive this one."""
    allocator = CachingAllocator(settings)
    left: dict[int, list[int]] = defaultdict(list)
    for one in requests[-1]:
        if one.death >= count:
            allocator.malloc(one.size)
    for _ in range(_ROUNDS):
        dying: dict[int, list[int]] = defaultdict(list)
        for one in requests[-1]:
            if one.death < count:
                handle = left[one.size].pop() if left[one.size] else allocator.malloc(one.size)
                dying[one.death].append(handle)
        for rest in left.values():
            while rest:
                allocator.free(rest.pop())
        for number in range(count):
            for handle in dying.pop(number, ()):
                allocator.free(handle)
            for one in requests.get(number, ()):
                handle = allocator.malloc(one.size)
                if one.death < count:
                    dying[one.death].append(handle)
                else:
                    left[one.size].append(handle)
    return allocator


RULE = Rule(code="TT212", name="fragmented-memory", check=check)
