"""What this machine's Python takes around operators that run again: measured once, and kept.

Operators that take next to no time run as they are and again, so that what differs is all overhead. Of many
rounds the least counts, since whatever else the machine does can only add.
"""

from __future__ import annotations

import platform
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import torch
from torch import nn

from torchtrim.core.caches import folder, write
from torchtrim.core.isolation import isolated
from torchtrim.executor.registry import Handle, technique
from torchtrim.records.plan import Technique
from torchtrim.records.profile import Overheads

_ROUNDS = 25
_PARTS, _FEW, _MANY = 10, 1, 11
_GELUS = 60


def overheads() -> Overheads | None:
    """Those of this machine, from the user's cache folder if they are there; None where there are none."""
    try:
        path = _path()
        return msgspec.json.decode(path.read_bytes(), type=Overheads)
    except RuntimeError:
        return measured()  # a user without a home
    except (OSError, msgspec.DecodeError):
        found = measured()
        if found is not None:
            write(path, msgspec.json.encode(found))
        return found


def measured() -> Overheads | None:
    """Measured now; None where the machine does so much else that what comes out makes no sense.

    In a thread of its own, where no mode, hook, default or trace of the caller's is on.
    """
    found = None
    with isolated("technique", "recompute or replay"), ThreadPoolExecutor(1) as pool:
        found = pool.submit(_measured).result()
    return found


def _measured() -> Overheads | None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        part, operator = _of_parts()
        tensor, watched = _of_tensors()
    except RuntimeError:
        return None
    finally:
        torch.set_num_threads(threads)
    again = tensor - operator
    if min(part, operator, again, watched) <= 0.0:
        return None
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
    operator = (many - few) / (_MANY - _FEW)
    return few - _FEW * operator, operator


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
    return (again - watched) / _GELUS, (watched - _seconds(model)) / (2 * _GELUS)


def _applied(model: nn.Module, name: str, places: list[str]) -> Handle:
    one = Technique(name=name, where=tuple(places), equivalence="BITWISE")
    return technique(name).apply({"Net": model}, one)


def _seconds(model: nn.Module) -> float:
    """The least that a forward and backward takes."""
    x, taken = torch.ones(2, 2, dtype=torch.float32, device="cpu", requires_grad=True), []
    for _ in range(_ROUNDS):
        begin = time.thread_time()
        model(x).sum().backward()
        taken.append(time.thread_time() - begin)
    return min(taken)
