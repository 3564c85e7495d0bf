"""Bytes by module add up to the peak."""

from __future__ import annotations

import pytest
import torch

import torchtrim
from models import SAMPLES, train
from torchtrim.analysis.by_module import by_module, most_of
from torchtrim.analysis.timeline import peak_operator, timeline
from torchtrim.records.profile import Profile


def recorded(name: str) -> Profile:
    torch.manual_seed(0)
    sample = SAMPLES[name]()
    optimizer = torch.optim.Adam(sample.model.parameters(), 1e-3)
    return torchtrim.measure(lambda: train(sample, optimizer), device="cpu").profile


@pytest.mark.parametrize("name", ["resnet", "tied", "lstm"])
def test_they_add_up_to_the_peak(name: str) -> None:
    profile = recorded(name)
    found = by_module(profile)
    assert sum(found.values()) == max(timeline(profile).high)
    assert list(found.values()) == sorted(found.values(), reverse=True)
    assert set(found) - {"", "Adam"} <= {module.path for module in profile.modules}


def test_most_of_a_kind_is_what_is_alive_at_once() -> None:
    profile = recorded("resnet")
    parameters = sum(s.bytes for s in profile.storages if s.kind == "parameter")
    assert most_of(profile, "parameter") == parameters
    assert most_of(profile, "gradient") == parameters


def test_at_any_operator() -> None:
    profile = recorded("resnet")
    before = by_module(profile, at=0)
    assert sum(before.values()) < sum(by_module(profile, at=peak_operator(profile)).values())
