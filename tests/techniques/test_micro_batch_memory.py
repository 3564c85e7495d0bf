"""What parts made is freed: results while later parts run, and the rest after backward."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from torchtrim.records.plan import Technique
from torchtrim.techniques.micro_batch.technique import TECHNIQUE

_FRESH = (torch.ops.aten.addmm.default, torch.ops.aten.empty.memory_format)


class _Results(TorchDispatchMode):
    """Notes the storages of layers' results, and of those of all parts."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[StorageWeakRef] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **kwargs or {})
        if func in _FRESH:
            self.made.append(StorageWeakRef(made.untyped_storage()))
        return made


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


class _Switched(nn.Module):
    """A model whose operators change between calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.deep = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x).relu()
        return self.layer(x).tanh() if self.deep else x


def _in_parts(model: nn.Module) -> None:
    plan = Technique(name="micro_batch", where=("Net",), options={"parts": 4})
    TECHNIQUE.apply({"Net": model}, plan)


def test_a_part_that_ran_other_operators_leaves_nothing() -> None:
    model = _Switched()
    _in_parts(model)
    model(torch.randn(16, 8))
    model.deep = True
    gc.collect()
    gc.disable()
    try:
        with _Results() as seen:
            out = model(torch.randn(16, 8))
        alive = [one.cdata for one in seen.made if not one.expired()]
    finally:
        gc.enable()
    assert len(seen.made) > 10
    assert alive == [out.untyped_storage()._cdata]


def test_a_loss_that_the_loop_keeps_keeps_no_call_once_its_graph_is_freed() -> None:
    model = nn.Linear(8, 8)
    _in_parts(model)
    out = model(torch.randn(16, 8))
    node: Any = out.grad_fn
    out.sum().backward(retain_graph=True)
    assert node.run is not None
    out.sum().backward()
    assert node.run is None
    with pytest.raises(RuntimeError, match="second time"):
        out.sum().backward()
