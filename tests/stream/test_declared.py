"""Caches that a person declares: bounded, exact within their windows, and given back."""

from __future__ import annotations

import copy
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from torchtrim.errors import Unsupported, UsageError
from torchtrim.stream import Evicted, HostSpill, bound_caches, persistent, volatile, window
from torchtrim.stream.lifetimes import unbounded


class Tracker(nn.Module):
    """Reads three frames back of `memory`, two of `recent`, and never an image again."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4))
        self.memory: dict[int, torch.Tensor] = {}
        self.recent: Any = deque()
        self.encoder = SimpleNamespace(images={})
        self.frame = 0
        self.back = 3

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        frame, self.frame = self.frame, self.frame + 1
        self.encoder.images[frame] = image
        near = [self.memory[one] for one in range(max(frame - self.back, 0), frame)]
        seen = torch.stack([self.encoder.images[frame], *near, *list(self.recent)[-2:]])
        out = torch.tanh(seen.sum(0) @ self.weight)
        self.memory[frame] = out.detach()
        self.recent.append(out.detach() / 2)
        return out


CACHES = {"memory": window(3), "recent": window(2), "encoder.images": volatile()}


def image(frame: int) -> torch.Tensor:
    return torch.sin(torch.arange(16.0).reshape(4, 4) * (frame + 1))


def run(model: Tracker, frames: int = 40) -> list[torch.Tensor]:
    return [model(image(model.frame)) for _ in range(frames)]


def test_results_are_equal_and_bytes_constant() -> None:
    free, tied = Tracker(), Tracker()
    bound = bound_caches(tied, CACHES)
    sizes = []
    for frame in range(1000):
        assert torch.equal(free(image(frame)), tied(image(frame)))
        sizes.append(bound.bytes)
    assert set(sizes[5:]) == {(4 + 2) * 64}
    assert (len(tied.memory), len(tied.recent), len(tied.encoder.images)) == (4, 2, 0)
    assert bound.store.bookkeeping < 600


@pytest.mark.parametrize("field", ["memory", "recent"])
def test_a_window_too_short_is_never_silent_or_equal(field: str) -> None:
    free, tied = run(Tracker()), Tracker()
    lifetime = window(1)
    bound_caches(tied, CACHES | {field: lifetime})
    if field == "memory":
        with pytest.raises(Evicted, match="declare a longer window") as gone:
            run(tied)
        assert gone.value.tombstone.field == "memory"
    else:
        different = [not torch.equal(a, b) for a, b in zip(free, run(tied), strict=True)]
        assert different.index(True) == 2


def test_release_gives_plain_caches_back() -> None:
    model = Tracker()
    before = copy.deepcopy(model.state_dict())
    hooks = len(model._forward_hooks)
    bound = bound_caches(model, CACHES)
    run(model, 10)
    bound.release()
    assert type(model.memory) is type(model.encoder.images) is dict
    assert len(model._forward_hooks) == hooks
    assert all(torch.equal(before[name], one) for name, one in model.state_dict().items())
    run(model, 10)
    assert len(model.memory) == 14


def test_what_went_long_ago_is_still_known() -> None:
    model = Tracker()
    bound_caches(model, CACHES)
    run(model, 600)
    for key in (0, 300, 590):
        with pytest.raises(Evicted):
            model.memory[key]
        assert key not in model.memory
        assert model.memory.get(key) is None
    for key in (700, "never"):
        with pytest.raises(KeyError) as missing:
            model.memory[key]
        assert not isinstance(missing.value, Evicted)


def test_a_cache_works_as_a_dict() -> None:
    model = Tracker()
    bound = bound_caches(model, {"memory": window(1)})
    cache = model.memory
    cache.update({1: torch.zeros(1)}, b=torch.zeros(2))
    cache |= {3: torch.zeros(3)}
    assert cache.setdefault(4, torch.zeros(4)).shape == (4,)
    assert cache.setdefault(4, None) is cache[4]
    bound.end_frame()
    assert bound.bytes == 4 * (1 + 2 + 3 + 4)
    assert cache.popitem()[0] == 4
    del cache[3]
    assert bound.store.bytes == 4 * (1 + 2)
    cache["b"] = torch.ones(2)
    bound.end_frame()
    bound.end_frame()
    assert list(cache) == ["b"]
    cache.clear()
    assert bound.store.bytes == 0


def test_a_cache_that_the_module_makes_anew_is_taken_over() -> None:
    model = Tracker()
    bound = bound_caches(model, CACHES)
    run(model, 10)
    model.memory, model.frame = {}, 0
    run(model, 20)
    assert type(model.memory) is not dict
    assert sorted(model.memory) == [16, 17, 18, 19]
    assert bound.frames == 30


def test_spilled_entries_come_back_to_the_bit() -> None:
    free, tied = run(Tracker()), Tracker()
    bound = bound_caches(tied, CACHES, budget=130, spill=HostSpill())
    found = run(tied)
    assert all(torch.equal(a, b) for a, b in zip(free, found, strict=True))
    assert bound.store.spilled_bytes > 0
    bound.release()
    assert all(torch.is_tensor(one) for one in tied.memory.values())
    assert bound.store.spilled_bytes == 0


def test_unbounded_is_as_if_not_bound() -> None:
    with unbounded():
        model = Tracker()
        bound_caches(model, CACHES)
        run(model)
        assert len(model.memory) == len(model.recent) == len(model.encoder.images) == 40


@pytest.mark.parametrize(
    ("caches", "error", "words"),
    [
        ({}, UsageError, "at least one"),
        ({"memories": window(3)}, UsageError, "has no 'memories'"),
        ({"encoder.pictures": window(3)}, UsageError, "'tracker.memory'"),
        ({"recent": persistent()}, UsageError, "window\\(n\\) and volatile"),
        ({"weight": window(3)}, Unsupported, "is a Parameter"),
        ({"memory": 3}, UsageError, "use window\\(15\\)"),
    ],
)
def test_what_is_no_cache(caches: Any, error: type[Exception], words: str) -> None:
    model = Tracker()
    with pytest.raises(error, match=words):
        bound_caches(model, caches)
    assert type(model.memory) is dict
    assert not model._forward_hooks


def test_binding_twice() -> None:
    model = Tracker()
    bound_caches(model, CACHES)
    with pytest.raises(UsageError, match="already bound"):
        bound_caches(model, CACHES)
