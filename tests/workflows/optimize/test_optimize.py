"""The whole loop for a script that was written for CUDA, where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchtrim import Script
from torchtrim.api import optimize_report
from torchtrim.records.trial import Request

SLOW = pytest.mark.slow
SCRIPT = """
import torch
from torch import nn

torch.manual_seed(0)
assert torch.cuda.is_available()
device = torch.device("cuda:0")
blocks = [nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.1), nn.GELU()) for _ in range(6)]
model = nn.Sequential(*blocks, nn.Linear(64, 8)).to(device)
optimizer = torch.optim.AdamW(model.parameters())
scaler = torch.amp.GradScaler("cuda")
for step in range(20):
    inputs = torch.randn(256, 64).pin_memory().to(device, non_blocking=True)
    target = torch.randint(8, (256,), device=device)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = nn.functional.cross_entropy(model(inputs), target)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""


@pytest.mark.usefixtures("without_replay")
@pytest.mark.parametrize(
    ("device", "told"),
    [(None, "emulated"), pytest.param("a10g", "emulated a10g", marks=SLOW)],
)
def test_a_script_for_cuda_is_fitted_and_proved(
    tmp_path: Path, device: str | None, told: str
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    script = Script(str(tmp_path / "train.py"), device=device)
    report = optimize_report(script, "70%", Request(steps=2)).report
    assert report.device == told
    assert report.certificate is not None
    assert report.certificate.verdict == "BITWISE"
    assert report.planned is not None
    assert report.plan is not None
    assert report.budget_bytes is not None
    assert report.planned.peak_bytes <= report.budget_bytes
    assert report.plan.predicted.peak_bytes == pytest.approx(report.planned.peak_bytes, rel=0.01)
    assert report.planned.reserved_bytes is not None
    assert report.planned.reserved_bytes >= report.planned.peak_bytes
    assert [found.line for found in report.findings if found.code == "TT101"] == [19]


def test_cpu_means_that_there_is_no_cuda(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    with pytest.raises(Exception, match="AssertionError"):
        optimize_report(Script(str(tmp_path / "train.py"), device="cpu"), "70%", Request(steps=1))
