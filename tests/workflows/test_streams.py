"""`--streams`: a script whose streams race is told at which line, and one that waits is left alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchtrim.api import Request, Script, diagnose_report
from torchtrim.errors import UsageError

SCRIPT = """
import sys
import torch
from torch import nn

model = nn.Linear(16, 16).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
side = torch.cuda.Stream()
for _ in range(8):
    x = torch.ones(8, 16, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = x * 2
    if "waits" in sys.argv:
        torch.cuda.current_stream().wait_stream(side)
    loss = model(y).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
RACING = 1 + SCRIPT.splitlines().index("    loss = model(y).square().mean()")


def test_the_line_that_races(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    script = Script(str(path), device="emulated", streams="late")
    racing = diagnose_report(script, Request(steps=1))
    found = [finding for finding in racing.report.findings if finding.code == "TT105"]
    assert [finding.line for finding in found] == [RACING]
    assert "What another stream computes or copies is read too early" in found[0].message
    waiting = diagnose_report(script._replace(args=("waits",)), Request(steps=1))
    assert not [finding for finding in waiting.report.findings if finding.code == "TT105"]


@pytest.mark.parametrize(("device", "streams"), [("cpu", "late"), ("emulated", "later")])
def test_streams_that_cannot_be_ordered(device: str, streams: str, tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    with pytest.raises(UsageError, match=f"--streams {streams}"):
        diagnose_report(Script(str(path), device=device, streams=streams), Request())
