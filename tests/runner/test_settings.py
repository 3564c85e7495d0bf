"""Memory that nothing wrote: a script that trains on it repeats itself, and its report says where."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from torchtrim.certify.compare import differences
from torchtrim.records.trial import Request
from torchtrim.runner.script import Script
from torchtrim.runner.settings import (
    Wide,
    fill_uninitialized,
    keep_wide_in_backward,
    load_as_written,
    note_uninitialized,
    precision,
    prepare,
    widen_old_types,
)
from torchtrim.workflows.optimize.fitting import Fitting

NARROW = torch.ones(2)
PICTURE = torch.ones(1, 1, 4, 4)


def test_a_cast_to_a_half_type_stays_and_meets_float64_there() -> None:
    data = torch.rand(2, 4)
    layer = nn.Linear(4, 2, dtype=torch.bfloat16)
    prepare(layer, Request(double=True))
    with precision(double=True, nudged=0):
        half = data.bfloat16()
        assert half.dtype is torch.bfloat16
        found = layer(half)
    assert found.dtype is torch.float64
    torch.testing.assert_close(found, layer(half.double()), rtol=0, atol=0)


def test_a_scaler_of_gradients_keeps_its_own_type() -> None:
    model = nn.Linear(4, 2).double()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    before = model.weight.detach().clone()
    with Wide():
        scaler.scale(model(torch.ones(3, 4, dtype=torch.float64)).sum()).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    assert model.weight.grad is not None
    assert torch.allclose(model.weight, before - 0.1 * model.weight.grad, rtol=1e-12)


def test_what_is_made_by_an_old_type_is_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (torch, torch.cuda):
        monkeypatch.setattr(module, "FloatTensor", module.FloatTensor)
    widen_old_types()
    assert torch.FloatTensor(2, 3).dtype is torch.float64
    assert torch.FloatTensor([1.0, 2.0]).tolist() == [1.0, 2.0]
    assert NARROW.type(torch.FloatTensor).dtype is torch.float64
    assert torch.cuda.FloatTensor is torch.cuda.DoubleTensor


@pytest.mark.parametrize("name", ["torch.FloatTensor", torch.float32])
def test_a_cast_by_name_is_to_float64(name: str) -> None:
    with Wide():
        assert NARROW.double().type(name).dtype is torch.float64
        assert NARROW.float().dtype is torch.float64
        assert NARROW.type("torch.IntTensor").dtype is torch.int32


def test_data_of_float32_goes_with_weights_of_float64() -> None:
    layer = torch.nn.Conv2d(1, 2, 3).double()
    with Wide():
        assert torch.equal(layer(PICTURE), layer(PICTURE.double()))
        with pytest.raises(RuntimeError, match="Kernel size"):
            layer(PICTURE[:, :, :2])


def test_complex_numbers_are_of_float64_too() -> None:
    module = torch.nn.Module()
    module.filter = torch.nn.Parameter(torch.full((3,), 1 + 2j, dtype=torch.complex64))
    prepare(module, Request(double=True))
    assert module.filter.dtype is torch.complex128
    assert module.filter[0] == 1 + 2j
    narrow = torch.full((2, 3), 1j, dtype=torch.complex64)
    with Wide():
        assert narrow.cfloat().dtype is narrow.to(torch.complex64).dtype is torch.complex128
        assert (narrow @ module.filter).tolist() == [-6 + 3j] * 2


@pytest.mark.parametrize(
    "write",
    [
        lambda narrow, wide: narrow.__setitem__(narrow > 0, wide),
        lambda narrow, wide: narrow.index_copy_(0, torch.tensor([0, 1]), wide),
        lambda narrow, wide: torch.dot(narrow, wide, out=narrow[0]),
    ],
)
def test_nothing_is_written_to_a_copy(write: Callable[[torch.Tensor, torch.Tensor], Any]) -> None:
    narrow, wide = torch.ones(2), torch.full((2,), 2.0).double()
    with Wide(), pytest.raises(RuntimeError, match="type"):
        write(narrow, wide)
    with Wide():
        assert wide.index_copy_(0, torch.tensor([0, 1]), narrow).tolist() == [1, 1]


def test_what_is_loaded_has_the_type_that_it_was_written_in(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch._utils, "_rebuild_tensor", torch._utils._rebuild_tensor)
    load_as_written()
    torch.save({"data": PICTURE}, tmp_path / "data.pt")
    with Wide():
        assert torch.equal(torch.load(tmp_path / "data.pt")["data"], PICTURE)


def test_what_runs_again_in_backward_is_wide_too(monkeypatch: pytest.MonkeyPatch) -> None:
    for owner in (torch.autograd, torch.autograd.graph):
        original = torch.autograd.graph._engine_run_backward
        monkeypatch.setattr(owner, "_engine_run_backward", original)
    keep_wide_in_backward()
    layer = torch.nn.Conv2d(1, 2, 3).double()
    with Wide():
        made = checkpoint(lambda: layer(PICTURE).float(), use_reentrant=False)
        made.sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.dtype is torch.float64


SCRIPT = """
import torch
from torch import nn

keep = [torch.rand(64, 64) for _ in range(8)]
with torch.device("meta"):
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 1))
del keep
model.to_empty(device="cpu")
model[0].reset_parameters()
optimizer = torch.optim.SGD(model.parameters(), 1e-2)
for _ in range(4):
    model(torch.rand(8, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_script_on_unwritten_memory_repeats_itself(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    one, other = (
        Fitting(Script(str(path), device="cpu"), Request(steps=1), lambda _: None).observe()
        for _ in range(2)
    )
    assert differences(one, other) == []
    (note,) = (note for note in one.notes if "to_empty" in note)
    assert "4 tensors of Sequential, first `1.weight`" in note


def test_what_is_written_is_not_told_of() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    original = nn.Module.to_empty
    try:
        fill_uninitialized()
        model.to_empty(device="cpu")
        values = [one.clone() for one in model.state_dict().values()]
        assert all(bool(one.isfinite().all()) for one in values)
        assert note_uninitialized(model)
        for one in model.children():
            one.reset_parameters()  # type: ignore[operator]
        assert note_uninitialized(model) == ()
    finally:
        nn.Module.to_empty = original  # type: ignore[method-assign]
