"""What this machine's Python takes around operators that run again: measured once, and kept.

Operators that take next to no time run as they are and again, so that what differs is all overhead. Of many
rounds the least counts, since whatever else the machine does can only add.
"""

from __future__ import annotations

import platform
import sys
import time
from pathlib import Path

import msgspec
import torch
from torch import nn

from torchtrim.caches import folder, write
from torchtrim.records.plan import Technique
from torchtrim.records.profile import Overheads
from torchtrim.techniques.base import Handle, technique

_ROUNDS = 25
_PARTS, _FEW, _MANY = 10, 1, 11
_GELUS = 60


def overheads() -> Overheads:
    """Those of this machine, from the user's cache folder if they are there."""
    path = _path()
    try:
        return msgspec.json.decode(path.read_bytes(), type=Overheads)
    except (OSError, msgspec.DecodeError):
        found = measured()
        write(path, msgspec.json.encode(found))
        return found


def measured() -> Overheads:
    """Measured now, in less than a second."""
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        part, operator = _of_parts()
        tensor, watched = _of_tensors()
    again = max(tensor - operator, 0.0)
    return Overheads(part=part, operator=operator, tensor=again, watched=watched)


def _path() -> Path:
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    name = f"{platform.node()}-python{version}-torch{torch.__version__}.json"
    return folder() / "overheads" / name


class _Part(nn.Module):
    """So many operators."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.count):
            x = torch.sigmoid(x)
        return x


class _Gelus(nn.Module):
    """Products and gelus by turns, which save what they read."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(_GELUS):
            x = nn.functional.gelu(x) * x
        return x


def _of_parts() -> tuple[float, float]:
    """Seconds that a part takes besides its operators, and each operator besides its own."""
    few, many = (_added(count) / _PARTS for count in (_FEW, _MANY))
    operator = max(many - few, 0.0) / (_MANY - _FEW)
    return max(few - _FEW * operator, 0.0), operator


def _added(count: int) -> float:
    model = nn.Sequential(*(_Part(count) for _ in range(_PARTS)))
    plain = _seconds(model)
    handle = _applied(model, "recompute", [f"Net.{part}" for part in range(_PARTS)])
    try:
        return _seconds(model) - plain
    finally:
        handle.revert()


def _of_tensors() -> tuple[float, float]:
    """Seconds that each tensor takes that is made again, and each operator that is watched."""
    model, found = _Gelus(), []
    for places in (["Net:gelu.999"], [f"Net:gelu.{number}" for number in range(_GELUS)]):
        handle = _applied(model, "replay", places)
        try:
            found.append(_seconds(model))
        finally:
            handle.revert()
    watched, again = found
    return max(again - watched, 0.0) / _GELUS, max(watched - _seconds(model), 0.0) / (2 * _GELUS)


def _applied(model: nn.Module, name: str, places: list[str]) -> Handle:
    one = Technique(name=name, where=tuple(places), equivalence="BITWISE")
    return technique(name).apply({"Net": model}, one)


def _seconds(model: nn.Module) -> float:
    """The least that a forward and backward takes."""
    x, taken = torch.ones(2, 2, requires_grad=True), []
    for _ in range(_ROUNDS):
        begin = time.thread_time()
        model(x).sum().backward()
        taken.append(time.thread_time() - begin)
    return min(taken)
