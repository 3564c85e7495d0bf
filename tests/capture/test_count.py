"""Bytes by kind, each storage once, without computing."""

import torch
from torch import Tensor, nn

import torchtrim
from torchtrim.capture.count import count_call, count_resident


def test_shared_storages_count_once() -> None:
    one, two = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    two.weight = one.weight
    model = nn.Sequential(one, two)
    block = torch.zeros(100)
    one.weight.grad = block[:16].view(4, 4)
    assert count_resident(model) == (64, 0, 400)


def test_a_call_holds_what_is_alive_at_once() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(inplace=True), nn.Linear(16, 4)).eval()
    most, made = count_call(model, torch.ones(2, 8))
    assert (most, made) == (128 + 32, 128 + 32)


def test_nothing_is_allocated_or_changed() -> None:
    model = nn.Sequential(nn.Linear(8, 1 << 20, bias=False), nn.Dropout(0.5))
    state = torch.get_rng_state()
    table = torchtrim.count_memory(model, torch.zeros(1, 8).expand(1 << 12, 8))
    assert table.made >= 1 << 34
    assert torch.equal(torch.get_rng_state(), state)


class OnValues(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return x + 1 if x.sum() > 0 else x


def test_where_it_has_to_run_it_leaves_no_trace() -> None:
    model = OnValues()
    most, _ = count_call(model, torch.ones(100))
    assert most >= 400
    assert model.calls == 0


def test_arguments_come_as_a_tensor_a_tuple_or_a_dict() -> None:
    model = nn.Bilinear(3, 4, 5)
    one, two = torch.ones(2, 3), torch.ones(2, 4)
    table = torchtrim.count_memory(model, (one, two))
    assert table == torchtrim.count_memory(model, {"input1": one, "input2": two})
    assert table.parameters == 4 * (5 * 3 * 4 + 5)
    assert table.total == table.outputs + table.parameters
