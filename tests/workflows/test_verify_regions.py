"""Without a copy of the process, a step is checked within itself, region by region, on an emulated device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import torchtrim
from torchtrim.errors import Diverged
from torchtrim.executor import block_state
from torchtrim.planner.plans import build_plan
from torchtrim.records.plan import Plan, Prediction, Technique
from torchtrim.runner.script import Script
from torchtrim.techniques.recompute import rerun
from torchtrim.workflows.verify import run_checked

SCRIPT = """
import torch
from torch import nn
torch.manual_seed(0)
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.drop = nn.Linear(16, 16), nn.Dropout(0.1)
        self.register_buffer("mean", torch.zeros(16))
    def forward(self, x):
        if STEP >= 4:
            self.mean.lerp_(x.detach().mean(0), 0.1)
        return self.drop(torch.relu(self.layer(x - self.mean))) + x
net = nn.Sequential(*(Block() for _ in range(3)), nn.Linear(16, 4)).to("cuda")
optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
for STEP in range(8):
    for _ in range(2):
        net(torch.randn(32, 16, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
print(sum(p.double().sum() for p in net.parameters()).item().hex())
"""


def plan() -> Plan:
    return build_plan(
        "",
        fingerprint={},
        techniques=(Technique(name="recompute", where=("Sequential.0", "Sequential.1")),),
        predicted=Prediction(peak_bytes=0, step_seconds=0.0),
        budget_bytes=1,
    )


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Script:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    return Script(str(path))


def checked(script: Script, every: int) -> None:
    with torchtrim.emulate():
        run_checked(script, plan(), every)


def test_a_sound_plan_passes_and_the_run_is_as_it_was(
    script: Script, capsys: pytest.CaptureFixture[str]
) -> None:
    with torchtrim.emulate():
        exec(compile(SCRIPT, "train.py", "exec"), {"__name__": "__main__"})
    plain = capsys.readouterr().out
    checked(script, 2)
    said = capsys.readouterr()
    assert said.out == plain
    assert "step 2: Sequential.0 equals the original, every bit of" in said.err
    assert "step 4: Sequential.1 equals the original, every bit of" in said.err
    assert "4 of 4 checked steps equal the original" in said.err


def late(wrong: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A recomputation that goes wrong after ten calls."""
    run, calls = rerun.run_again, [0]

    def again(*args: object, **kwargs: object) -> torch.Tensor:
        calls[0] += 1
        result: torch.Tensor = run(*args, **kwargs)  # type: ignore[arg-type]
        return wrong(result) if calls[0] > 10 else result

    return again


def test_a_late_fault_stops_the_run_before_its_update(
    script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rerun, "run_again", late(lambda one: one * 1.01))
    with pytest.raises(Diverged, match=r"step 4 differs from the original in Sequential\.1"):
        checked(script, 1)
    assert Path("train-before-step-4.pt").is_file()


def test_a_buffer_that_a_block_begins_to_write_twice_stops_it(
    script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`recompute` restores such buffers; here it does not."""
    monkeypatch.setattr(block_state.Before, "again", lambda _: contextlib.nullcontext())
    with pytest.raises(
        Diverged, match=r"step [56] differs from the original in Sequential\.\d, first in"
    ):
        checked(script, 1)
