"""`scheduler.set_begin_index(0)` before a loop over `scheduler.timesteps`."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from fixes import proving
from torchtrim.fixes.begun_schedule import FIX

SCHEDULER = """
import torch

class EulerDiscreteScheduler:
    def __init__(self, steps, device):
        self.timesteps = torch.linspace(900, 0, steps).to(device)
        self.sigmas = [1.0 + n for n in range(steps)]
        self.begin = self.at = None

    def set_begin_index(self, begin):
        self.begin = begin

    def step(self, noise, t, x):
        if self.at is None:
            self.at = self.begin if self.begin is not None else (self.timesteps == t).nonzero()[0].item()
        x = x - noise / self.sigmas[self.at]
        self.at += 1
        return x
"""
LOOPS = (
    "for t in s.timesteps:\n        x = s.step(x * 0.1, t, x)",
    "for i, t in enumerate(s.timesteps):\n        y = x + i\n        x = s.step(y, t, x)",
)


def code(loop: str, kind: str = "EulerDiscreteScheduler") -> str:
    text = SCHEDULER.replace("EulerDiscreteScheduler", kind)
    return f"{text}\ndef function(x, n):\n    s = {kind}(n, x.device)\n    {loop}\n    return x\n"


def make(rng: random.Random) -> Iterator[proving.Inputs]:
    size, graded = proving.shape(rng), rng.random() < 0.5
    for _ in range(proving.DRAWS):
        x = proving.floating(rng, size, torch.float32).requires_grad_(graded)
        yield {"x": x, "n": rng.choice((1, 2, 6))}


@pytest.mark.parametrize("loop", LOOPS)
def test_it_is_sound(loop: str) -> None:
    assert proving.prove(FIX, code(loop), make, structures=130).reaches(500)


def test_what_is_written() -> None:
    (edit,) = proving.fixed(FIX, code(LOOPS[0]), {"x": torch.ones(2), "n": 3}).edits
    assert edit.text == "    s.set_begin_index(0)\n"


def test_it_is_refused() -> None:
    inputs = {"x": torch.ones(2), "n": 3}
    proving.refuses(FIX, code(LOOPS[0], "MyScheduler"), inputs, "is a diffusers scheduler")
    proving.refuses(
        FIX, code(f"s.set_begin_index(1)\n    {LOOPS[0]}"), inputs, "already sets the index"
    )


@pytest.mark.parametrize(
    "loop",
    [
        "for t in s.timesteps[1:]:\n        x = s.step(x, t, x)",
        "for t in s.timesteps:\n        x = x + t",
    ],
)
def test_what_is_no_match(loop: str) -> None:
    with pytest.raises(ValueError, match="not enough values"):
        proving.fixed(FIX, code(loop), {"x": torch.ones(2), "n": 3})


def test_it_waits_for_nothing_but_its_steps() -> None:
    before, after = proving.syncs_go(FIX, code(LOOPS[0]), {"x": torch.ones(2), "n": 3})
    assert before - after == 2
