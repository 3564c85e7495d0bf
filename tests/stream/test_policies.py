"""The order in which a budget takes entries."""

import pytest
import torch

from torchtrim.stream import (
    Cheapest,
    Largest,
    LeastRead,
    LeastRecent,
    Oldest,
    Policy,
    StateStore,
    window,
)

SIZES = {0: 8, 1: 24, 2: 16, 3: 8}


@pytest.mark.parametrize(
    ("policy", "goes"),
    [
        (Oldest(), 0),
        (LeastRecent(), 2),
        (LeastRead(), 3),
        (Largest(), 1),
        (Cheapest(lambda key: 1.0 if key[1] == 3 else 100.0), 3),
    ],
)
def test_each_takes_its_own_first(policy: Policy, goes: int) -> None:
    store = StateStore({"a": window(99)}, budget=4 * sum(SIZES.values()), policy=policy)
    for frame, size in SIZES.items():
        store["a", frame] = torch.zeros(size)
    for frame in (2, 2, 1, 1, 0, 0, 3):
        store["a", frame]
    store["a", 9] = torch.zeros(1)
    assert {frame for frame in SIZES if ("a", frame) not in store} == {goes}
    del store["a", 9]
