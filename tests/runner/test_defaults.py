"""A script may set torch's defaults: our own tensors are where and what they always are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import torchtrim
from steps import squared
from torchtrim import Script, TrainStep
from torchtrim.api import optimize_report
from torchtrim.capture.snapshot import Snapshot
from torchtrim.dispatch.storages import counts_tell
from torchtrim.evidence.attributes import described
from torchtrim.records.trial import Request

SCRIPT = """
import torch
from torch import nn
torch.set_default_tensor_type("torch.cuda.DoubleTensor")
torch.manual_seed(0)
blocks = [nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 32)) for _ in range(4)]
net = nn.Sequential(*blocks)
opt = torch.optim.Adam(net.parameters())
for _ in range(6):
    opt.zero_grad()
    net(torch.randn(256, 32)).square().mean().backward()
    opt.step()
"""


@pytest.fixture(params=["meta", "cpu"])
def _other_defaults(request: pytest.FixtureRequest) -> Iterator[None]:
    torch.set_default_device(request.param)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)


@pytest.mark.usefixtures("_other_defaults")
def test_how_references_are_counted_is_found_out() -> None:
    assert counts_tell.__wrapped__()


@pytest.mark.usefixtures("_other_defaults")
def test_a_snapshot_restores_random_numbers() -> None:
    snapshot = Snapshot([], [])
    first = torch.rand(3, device="cpu")
    snapshot.restore()
    assert torch.equal(torch.rand(3, device="cpu"), first)


@pytest.mark.usefixtures("_other_defaults")
def test_a_number_in_an_attribute_keeps_its_value() -> None:
    (tensor,) = described(0.1).tensors
    assert tensor.item() == 0.1


@pytest.mark.usefixtures("_other_defaults")
def test_a_live_model_is_planned_as_without_them() -> None:
    with torch.device("cpu"):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 64), nn.Tanh()) for _ in range(2)))
        model[1][0] = nn.Linear(64, 64)
        batch = torch.randn(64, 16)
    step = TrainStep(model, squared, torch.optim.SGD(model.parameters(), 0.1), batch)
    with torchtrim.fit(step, "99%", steps=2) as fitted:
        assert fitted.certificate is not None
        assert fitted.certificate.verdict == "BITWISE"


def test_a_script_that_only_sets_a_type_of_cuda_is_planned_on_the_emulated_device(
    tmp_path: Path,
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    report = optimize_report(Script(str(tmp_path / "train.py")), "70%", Request(steps=2)).report
    assert report.device.startswith("emulated")
    assert report.certificate is not None
    assert report.certificate.verdict == "BITWISE"
    assert report.original is not None
    assert report.original.by_kind["parameter"] >= 8 * 4 * (2 * 32 * 128 + 128 + 32)
