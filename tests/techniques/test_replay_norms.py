"""What a batch norm takes that runs again is known from the norm."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import torchtrim
from torchtrim.capture.workload import TrainStep
from torchtrim.records.operator_names import base_name
from torchtrim.techniques.replay.table import norm_share


@pytest.mark.parametrize(
    ("shape", "last", "trains", "wanted"),
    [
        ((2, 3, 8, 8), False, True, 0.3),
        ((2, 3, 8, 8), True, True, 0.65),
        ((2, 3, 8, 8), False, False, 1.0),
        ((2, 3, 1, 1), False, True, 0.65),
        ((4, 3), False, True, 0.65),
        ((4, 3, 5), False, True, 0.3),
    ],
)
def test_it_is_known_from_the_norm(
    shape: tuple[int, ...], last: bool, trains: bool, wanted: float
) -> None:
    kind = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d}[len(shape)]
    model, x = kind(3).train(trains), torch.randn(shape)
    if last:
        x = x.to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = TrainStep(model, lambda model, x: model(x).sum(), optimizer, x)
    profile = torchtrim.record(step)
    (norm,) = (one for one in profile.operators if base_name(one.name) == "aten::native_batch_norm")
    assert norm_share(norm, "cpu") == wanted
    assert norm_share(norm, "cuda") == 1.0
