"""`torch.device` on an emulated device."""

from __future__ import annotations

import copy
import io
import pickle
import typing
from typing import Any

import pytest
import torch

from torchtrim.emulator import emulate


@pytest.mark.usefixtures("device")
def test_a_number_is_a_device() -> None:
    made: Any = torch.device
    assert made(0) == torch.device("cuda", 0)
    assert torch.ones(2, device=made(0)).is_cuda
    assert made("cpu").type == "cpu"
    assert made("cuda:0").index == made(type="cuda", index=0).index == 0
    with pytest.raises(RuntimeError, match="invalid device ordinal: 3"):
        made(3)
    with pytest.raises(RuntimeError, match="Expected one of"):
        made("nothing")


@pytest.mark.usefixtures("device")
def test_it_is_the_same_type() -> None:
    own = type(torch.ones(1).device)
    assert isinstance(torch.ones(1).device, torch.device)
    assert not isinstance("cpu", torch.device)
    assert own == torch.device
    assert {own: 1}[torch.device] == {torch.device: 1}[own] == 1
    assert torch.device in typing.get_args(torch.device | None)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("weights_only", [True, False])
def test_devices_are_saved_and_copied(weights_only: bool) -> None:
    devices = [torch.device("cuda", 0), torch.device("cuda"), torch.device("cpu")]
    assert copy.deepcopy(devices) == devices
    assert pickle.loads(pickle.dumps(devices)) == devices
    file = io.BytesIO()
    torch.save({"devices": devices}, file)
    file.seek(0)
    assert torch.load(file, weights_only=weights_only)["devices"] == devices


def test_what_was_saved_is_read_without_the_device() -> None:
    own = torch.device
    with emulate():
        saved = pickle.dumps(torch.device("cuda", 0))
    assert torch.device is own
    assert pickle.loads(saved) == torch.device("cuda", 0)
    assert pickle.loads(pickle.dumps(torch.device("cpu"))) == torch.device("cpu")
