"""Estimates of scripts that only run a model, against runs on the emulated device."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from torchtrim.api import Request, Script, estimate_report
from torchtrim.emulator.device import emulate
from torchtrim.records.report import Result

GENERATES = """
import torch
from torch import nn

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.Linear(64, 192)

    def forward(self, x, past):
        q, k, v = self.project(x).chunk(3, -1)
        if past is not None:
            k, v = torch.cat([past[0], k], 1), torch.cat([past[1], v], 1)
        return torch.softmax(q @ k.mT, -1) @ v, (k, v)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.block, self.head = nn.Embedding(50, 64), Attention(), nn.Linear(64, 50)

    def forward(self, tokens, past=None):
        x, past = self.block(self.embed(tokens), past)
        return self.head(x), past

    @torch.no_grad()
    def generate(self, tokens, count):
        past, last = None, tokens
        for _ in range(count):
            logits, past = self(last, past)
            last = logits[:, -1:].argmax(-1)
            tokens = torch.cat([tokens, last], 1)
        return tokens

model = Model().cuda().eval()
tokens = model.generate(torch.randint(50, (4, 16)).cuda(), COUNT)
peak = torch.cuda.max_memory_allocated()
word = {number: str(number) for number in range(50)}[tokens[0, 0].item() + LATER]
"""

LOOPS = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8)).cuda().eval()
kept = []
for (x,) in DataLoader(TensorDataset(torch.randn(500, 64)), batch_size=32):
    with torch.no_grad():
        y = model(x.cuda())
    kept.append(y.cpu())
peak = torch.cuda.max_memory_allocated()
"""


def estimated(path: Path, **options: str) -> Result:
    return estimate_report(Script(str(path), device="a100"), Request(steps=0, dry=True), **options)


def measured(path: Path) -> int:
    with emulate():
        return int(runpy.run_path(str(path))["peak"])


@pytest.mark.slow
def test_generation_peaks_at_its_last_token_or_in_its_prompt(tmp_path: Path) -> None:
    for count in (2, 40):
        path = tmp_path / f"generate_{count}.py"
        path.write_text(GENERATES.replace("COUNT", str(count)).replace("LATER", "0"))
        result = estimated(path)
        assert result.report.original is not None
        assert result.report.original.peak_bytes == measured(path)
        assert any(f"of {count} calls, number " in note for note in result.report.notes)


def test_what_fails_after_the_calls_is_said(tmp_path: Path) -> None:
    path = tmp_path / "fails.py"
    path.write_text(GENERATES.replace("COUNT", "3").replace("LATER", "1000"))
    notes = estimated(path).report.notes
    assert any("KeyError: 1000" in note for note in notes)


@pytest.mark.slow
def test_a_loop_over_batches_and_the_largest_one(tmp_path: Path) -> None:
    path = tmp_path / "loop.py"
    path.write_text(LOOPS)
    result = estimated(path, fits="9MiB", max_batch="9MiB")
    report = result.report
    assert report.original is not None
    assert report.estimated is not None
    assert report.original.peak_bytes == measured(path)
    (grown,) = report.estimated.growth
    assert grown.now == 32
    path.write_text(LOOPS.replace("batch_size=32", f"batch_size={grown.largest}"))
    assert measured(path) == grown.peak_bytes <= 9 * 2**20 - report.estimated.workspace_bytes
