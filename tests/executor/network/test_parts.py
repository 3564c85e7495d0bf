"""Parts of the batch: equal, smaller, and refused where samples see each other."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchtrim
from torchtrim.executor.network.parts import PartsProgram
from torchtrim.executor.network.planned import Planned


def convolutions() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 8, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 5)),
    ).eval()


def in_parts(model: nn.Module, inputs: Tensor, parts: int) -> PartsProgram | None:
    """The program in parts, None where the whole batch runs at once."""
    known = Planned.known(model)
    program = known.program(inputs) if known is not None else None
    return program if isinstance(program, PartsProgram) else None


@pytest.mark.parametrize("batch", [2, 7, 16, 33])
def test_parts_give_every_bit_of_the_whole(batch: int) -> None:
    model, inputs = convolutions(), torch.randn(batch, 3, 12, 12)
    with torch.no_grad():
        wanted = model(inputs)
    with torchtrim.optimize_memory(model, inputs, split_batch=4, verify=False) as fitted:
        program = in_parts(model, inputs, 4)
        assert program is not None
        assert sum(program.parts) == batch
        assert torch.allclose(model(inputs), wanted, rtol=1e-6, atol=1e-6)
        assert fitted.after.total < fitted.before.total


def test_the_certificate_says_how_equal_it_is() -> None:
    model, inputs = convolutions(), torch.randn(16, 3, 12, 12)
    with torchtrim.optimize_memory(model, inputs, split_batch=4) as fitted:
        assert fitted.certificate is not None
        assert fitted.certificate.verdict in ("BITWISE", "ROUNDING")
        assert "1 output x 2 steps" in fitted.certificate.compared
        assert [t.name for t in fitted.plan.techniques][-1] == "split_batch"


def test_a_batch_of_one_has_no_parts_and_says_so() -> None:
    model, inputs = convolutions(), torch.randn(1, 3, 12, 12)
    with torchtrim.optimize_memory(model, inputs, split_batch=4, verify=False) as fitted:
        assert "one sample" in fitted.notes[0]
        assert in_parts(model, inputs, 4) is None


COUPLED: dict[str, Callable[[Tensor], Tensor]] = {
    "mean over samples": lambda x: x - x.mean(0),
    "softmax over samples": lambda x: F.softmax(x, 0),
    "sum over samples": lambda x: x.cumsum(0),
    "turned round": lambda x: x.flip(0),
    "their number": lambda x: x / x.shape[0],
    "norm by the batch": lambda x: F.batch_norm(x, None, None, training=True),
    "attention between them": lambda x: x.flatten(1) @ x.flatten(1).t(),
    "numbered": lambda x: x + torch.arange(x.shape[0]).view(-1, 1, 1, 1),
    "moved into channels": lambda x: x.transpose(0, 1).reshape(-1, 6, 6),
    "drawn": lambda x: F.dropout(x, 0.5),
}


class Coupling(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.first = nn.Conv2d(3, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return COUPLED[self.name](F.max_pool2d(F.relu(self.first(x)), 2))


@pytest.mark.parametrize("name", COUPLED)
def test_samples_that_see_each_other_are_not_parted(name: str) -> None:
    torch.manual_seed(0)
    model, inputs = Coupling(name).eval(), torch.randn(8, 3, 12, 12)
    torch.manual_seed(1)
    with torch.no_grad():
        wanted = model(inputs)
    with torchtrim.optimize_memory(model, inputs, split_batch=4, verify=False):
        torch.manual_seed(1)
        assert torch.allclose(model(inputs), wanted, rtol=1e-6, atol=1e-6)


def test_other_inputs_keep_their_length() -> None:
    class Two(nn.Module):
        def forward(self, x: Tensor, table: Tensor) -> Tensor:
            return F.relu(x.repeat_interleave(2, 1) @ table)[:, :3]

    model, x, table = Two().eval(), torch.randn(8, 4), torch.randn(8, 5)
    with torch.no_grad():
        wanted = model(x, table)
    with torchtrim.optimize_memory(model, (x, table), split_batch=4, verify=False):
        assert torch.allclose(model(x, table), wanted)
