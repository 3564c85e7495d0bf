"""Memory that nothing wrote: a script that trains on it repeats itself, and its report says where."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from torchtrim.certify.compare import differences
from torchtrim.records.trial import Request
from torchtrim.runner.script import Script
from torchtrim.runner.settings import uninitialized as emptied
from torchtrim.workflows.optimize.fitting import Fitting

SCRIPT = """
import torch
from torch import nn

keep = [torch.rand(64, 64) for _ in range(8)]
with torch.device("meta"):
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 1))
del keep
model.to_empty(device="cpu")
model[0].reset_parameters()
optimizer = torch.optim.SGD(model.parameters(), 1e-2)
for _ in range(4):
    model(torch.rand(8, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_script_on_unwritten_memory_repeats_itself(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    one, other = (
        Fitting(Script(str(path), device="cpu"), Request(steps=1), lambda _: None).observe()
        for _ in range(2)
    )
    assert differences(one, other) == []
    (note,) = (note for note in one.notes if "to_empty" in note)
    assert "4 tensors of Sequential, first `1.weight`" in note


def test_what_is_written_is_not_told_of() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    original = nn.Module.to_empty
    try:
        emptied.install()
        model.to_empty(device="cpu")
        values = [one.clone() for one in model.state_dict().values()]
        assert all(bool(one.isfinite().all()) for one in values)
        assert emptied.note_on(model)
        for one in model.children():
            one.reset_parameters()  # type: ignore[operator]
        assert emptied.note_on(model) == ()
    finally:
        nn.Module.to_empty = original  # type: ignore[method-assign]
