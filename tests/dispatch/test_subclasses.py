"""Plain subclasses of tensors under a dispatch mode."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from torchtrim.dispatch.patches import Patches
from torchtrim.dispatch.subclasses import patch_subclasses


class Noise(torch.Tensor):
    """A tensor with a method, as GANs have for what they draw."""

    def draw(self) -> Noise:
        self.normal_()
        return self


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.fixture
def patched() -> Iterator[None]:
    patches = Patches()
    patch_subclasses(patches)
    yield
    patches.undo()


@pytest.mark.usefixtures("patched")
@pytest.mark.parametrize(
    "data", [(torch.arange(6.0),), ([1.0, 2.0],), (2, 3), (torch.Size([2, 3]),), ()]
)
def test_a_subclass_is_constructed_as_without_a_mode(data: tuple[Any, ...]) -> None:
    with Seen():
        made = Noise(*data).draw()
    assert type(made) is Noise
    assert made.shape == Noise(*data).shape
    assert not data or not isinstance(data[0], torch.Tensor) or data[0].equal(made)


@pytest.mark.usefixtures("patched")
def test_it_shares_data_and_gradients() -> None:
    x = torch.ones(3, requires_grad=True)
    with Seen() as mode:
        Noise(x).square().sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full((3,), 2.0))
    with mode:
        Noise(2, 3)
    assert "aten::empty.memory_format" in mode.names, "what is new is seen"


@pytest.mark.usefixtures("patched")
def test_dynamo_can_be_imported_later() -> None:
    """It has a polyfill for the constructor, and accepts its own signature or one that takes everything."""
    found = inspect.signature(torch.Tensor.__new__).parameters.values()
    assert [one.kind.name for one in found] == ["VAR_POSITIONAL", "VAR_KEYWORD"]


def test_nothing_stays_patched() -> None:
    before = torch.Tensor.__new__
    patches = Patches()
    patch_subclasses(patches)
    patches.undo()
    assert torch.Tensor.__new__ is before
    assert type(Noise(torch.ones(2))) is Noise
    assert torch.Tensor([1.0]).tolist() == [1.0]
