from __future__ import annotations

import pytest
import torch
from torch import nn

from torchtrim.capture.modules import Modules


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 3)
        self.blocks = nn.Sequential(nn.ReLU(), nn.BatchNorm1d(3))
        self.head = nn.Linear(3, 4, bias=False)
        self.head.weight = self.embedding.weight


def test_every_module_has_a_number_a_path_and_a_parent() -> None:
    modules, model = Modules(), Tied()
    assert modules.add_root(model) == "Tied"
    assert [(record.path, record.parent, record.type) for record in modules.records] == [
        ("Tied", -1, "Tied"),
        ("Tied.embedding", 0, "Embedding"),
        ("Tied.blocks", 0, "Sequential"),
        ("Tied.blocks.0", 2, "ReLU"),
        ("Tied.blocks.1", 2, "BatchNorm1d"),
        ("Tied.head", 0, "Linear"),
    ]
    assert [record.chain for record in modules.records].index(True) == 2
    assert modules.number(model.blocks[1]) == 4
    assert modules.number(nn.ReLU()) == -1


def test_a_root_is_added_once_and_a_second_of_its_class_gets_a_number() -> None:
    modules, first, second = Modules(), nn.ReLU(), nn.ReLU()
    assert [modules.add_root(root) for root in (first, second, first)] == ["ReLU", "ReLU#2", "ReLU"]
    assert len(modules.records) == 2


def test_a_submodule_that_was_a_root_before_keeps_its_name() -> None:
    modules, model = Modules(), Tied()
    modules.add_root(model.blocks)
    modules.add_root(model)
    paths = [record.path for record in modules.records]
    assert paths.count("Sequential.1") == 1
    assert "Tied.blocks.1" not in paths
    names = [name for _, name, _ in modules.named_tensors()]
    assert "Sequential.1.weight" in names
    assert "Tied.blocks.1.weight" not in names
    assert "Tied.embedding.weight" in names


def test_a_tied_tensor_comes_once_and_buffers_with_parameters() -> None:
    modules = Modules()
    modules.add_root(Tied())
    found = {name: kind for kind, name, _ in modules.named_tensors()}
    assert found["Tied.embedding.weight"] == "parameter"
    assert "Tied.head.weight" not in found
    assert found["Tied.blocks.1.running_mean"] == "buffer"


def test_hooks_of_the_users_are_noted() -> None:
    model = Tied()
    model.blocks.register_forward_hook(lambda module, args, output: None)
    modules = Modules()
    modules.add_root(model)
    assert [record.path for record in modules.records if record.hooked] == ["Tied.blocks"]


@pytest.mark.parametrize(
    ("register", "forward_only"),
    [("register_module_forward_pre_hook", True), ("register_module_full_backward_hook", False)],
)
def test_hooks_on_all_modules_are_noted(register: str, forward_only: bool) -> None:
    """Only those on the forward may be called again, by a rerun that is given what forward was given."""
    modules = Modules()
    hook = getattr(nn.modules.module, register)(lambda module, *args: None)
    try:
        modules.add_root(nn.Sequential(nn.Linear(2, 2)))
    finally:
        hook.remove()
    assert all(record.hooked for record in modules.records)
    assert all(record.hooked_with_all == forward_only for record in modules.records)


def test_bytes_of_the_module_alone() -> None:
    modules = Modules()
    modules.add_root(Tied())
    assert [record.parameter_bytes for record in modules.records] == [0, 48, 0, 0, 24, 48]


def test_lazy_parameters_are_left_out_until_they_have_a_shape() -> None:
    modules, lazy = Modules(), nn.LazyLinear(2)
    modules.add_root(lazy)
    assert modules.records[0].parameter_bytes == 0
    assert not list(modules.named_tensors())
    lazy(torch.ones(1, 3))
    assert modules.settled(lambda _: -1)[0].parameter_bytes == (3 + 1) * 2 * 4
    assert len(list(modules.named_tensors())) == 2
