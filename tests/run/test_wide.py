from __future__ import annotations

import pytest
import torch

from torchtrim.run.wide import Wide, widen_old_types

NARROW = torch.ones(2)


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
