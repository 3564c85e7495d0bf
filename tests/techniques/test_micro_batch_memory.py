"""Results of earlier parts are freed while later parts run."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from torchtrim.records.plan import Technique
from torchtrim.techniques.micro_batch.technique import TECHNIQUE


class _LiveResults(TorchDispatchMode):
    """Counts, at each ReLU of a part, the results of earlier parts that are alive."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: list[int] = []
        self._made: list[StorageWeakRef] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **kwargs or {})
        if func is torch.ops.aten.relu.default:
            self.alive.append(sum(not one.expired() for one in self._made))
            self._made.append(StorageWeakRef(made.untyped_storage()))
        return made


def test_a_part_finds_no_result_alive_but_that_of_the_part_before() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    plan = Technique(name="micro_batch", where=("Net",), options={"parts": 8})
    TECHNIQUE.apply({"Net": model}, plan)
    model(torch.randn(16, 8))  # The first call studies the model.
    with _LiveResults() as seen:
        model(torch.randn(16, 8))
    assert seen.alive == [0, *[1] * 7]
