"""Saves of weights that are ahead of their step are checked, and only inside the context."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import nn

from torchtrim.runner.planned_script import checked_saves


def stop() -> None:
    raise RuntimeError("ahead of its step")


@pytest.mark.parametrize(
    "save", [lambda net: net.state_dict(), lambda net: torch.save(net.weight, io.BytesIO())]
)
def test_saving_is_checked_first(save: Any) -> None:
    net = nn.Linear(2, 2)
    with checked_saves(stop), pytest.raises(RuntimeError, match="ahead of its step"):
        save(net)
    save(net)


def test_a_check_that_passes_changes_nothing() -> None:
    net, asked = nn.Linear(2, 2), []
    with checked_saves(lambda: asked.append(1)):
        saved = net.state_dict()
    assert asked == [1]
    assert saved.keys() == net.state_dict().keys()


def test_the_originals_are_back_after_an_exception() -> None:
    originals = nn.Module.state_dict, torch.save
    with pytest.raises(KeyError), checked_saves(stop):
        raise KeyError
    assert (nn.Module.state_dict, torch.save) == originals


def test_a_wrapper_put_on_meanwhile_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "save", torch.save)
    with checked_saves(lambda: None):
        torch.save = other = lambda *_: None
    assert torch.save is other
