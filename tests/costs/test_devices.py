"""Named devices, each with where its figures stand."""

import pytest

from torchtrim.costs.devices import DEVICES, device_named, guess_note
from torchtrim.errors import UsageError


def test_every_device_has_its_figures_and_where_they_stand() -> None:
    wanted = "a10g a100 h100 h200 b200 l4 l40s t4 v100 mi300x rtx4090"
    assert set(DEVICES) == set(wanted.split())
    for device in DEVICES.values():
        assert device.source.startswith("https://")
        assert device.measured_on.startswith("https://")
        assert set(device.guessed) < set(device.flops)
        said = guess_note(f"emulated {device.name}")
        assert bool(said) is bool(device.guessed)
        assert all(rate in said for rate in device.guessed)
        assert device.flops["float16"] >= device.flops["float32"] > device.flops["float64"]
        assert device.peak("int8") == device.flops["float32"]
        assert 1e-6 < device.call < device.launch < 1e-4


def test_names() -> None:
    assert device_named("RTX-4090") is DEVICES["rtx4090"]
    with pytest.raises(UsageError, match=r"unknown device 'h300'.*a100"):
        device_named("h300")
