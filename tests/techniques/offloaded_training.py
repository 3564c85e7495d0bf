"""A training with its optimizer offloaded, which is killed again and again and goes on from what it saved.

    python offloaded_training.py FOLDER KILLS SEED

Exits with 0 if what it ends with is bit for bit what an undisturbed, plain training ends with.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn

from torchtrim.emulator import emulate
from torchtrim.records.plan import Technique
from torchtrim.techniques.offload_optimizer.technique import TECHNIQUE

STEPS, EVERY = 150, 5


def train(folder: Path, *, offloaded: bool) -> None:
    """Trains to the end from the last checkpoint, if there is one."""
    with emulate(streams="late"):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4)).cuda()
        optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
        if offloaded:
            where = Technique(name=TECHNIQUE.name, where=("O",), options={"chunk_bytes": 2000})
            TECHNIQUE.apply({"O": optimizer}, where)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
        parts = {"net": net, "optimizer": optimizer, "scheduler": scheduler}
        first = _resume(folder, parts)
        for number in range(first, STEPS):
            torch.manual_seed(number)
            net(torch.randn(8, 16, device="cuda")).square().mean().backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if (number + 1) % EVERY == 0:
                _save(folder, number + 1, parts)


def _resume(folder: Path, parts: dict) -> int:  # type: ignore[type-arg]
    path = folder / "checkpoint.pt"
    if not path.exists():
        return 0
    saved = torch.load(path, map_location="cpu")
    for name, part in parts.items():
        part.load_state_dict(saved[name])
    return int(saved["step"])


def _save(folder: Path, step: int, parts: dict) -> None:  # type: ignore[type-arg]
    path = folder / "checkpoint.pt"
    states = {name: part.state_dict() for name, part in parts.items()}
    torch.save({"step": step, **states}, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)


def _child(folder: Path) -> int:
    """Trains in a process of its own, which ends like the training."""
    number = os.fork()
    if not number:
        status = 1
        try:
            train(folder, offloaded=True)
            status = 0
        finally:
            os._exit(status)
    return number


def _is_equal(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor):
        assert isinstance(other, torch.Tensor)
        return torch.equal(one.cpu(), other.cpu())
    if isinstance(one, dict):
        assert isinstance(other, dict)
        return one.keys() == other.keys() and all(_is_equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        assert isinstance(other, list | tuple)
        return len(one) == len(other) and all(map(_is_equal, one, other))
    return one == other


def main() -> None:
    folder, kills, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    rng = random.Random(seed)
    for _ in range(kills):
        number = _child(folder)
        time.sleep(rng.uniform(0.0, 0.2))
        os.kill(number, signal.SIGKILL)
        os.waitpid(number, 0)
    _, status = os.waitpid(_child(folder), 0)
    assert status == 0, "the last training failed"
    plain = folder / "plain"
    plain.mkdir()
    train(plain, offloaded=False)
    one, other = (
        torch.load(path / "checkpoint.pt", map_location="cpu") for path in (folder, plain)
    )
    sys.exit(0 if _is_equal(one, other) else "the checkpoints differ")


if __name__ == "__main__":
    main()
