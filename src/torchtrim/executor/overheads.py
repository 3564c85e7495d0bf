"""Measure this machine's host overhead of recomputation once, and cache it.

Runs operators that take almost no time, with and without recomputation, so the difference is overhead. Takes
the minimum of many rounds, since other load on the machine can only add time.
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
from torchtrim.dispatch.threads import OURS
from torchtrim.executor.registry import technique
from torchtrim.records.plan import Technique
from torchtrim.records.profile import Overheads

_ROUNDS = 25  # Arbitrary: enough for a stable minimum.
_PARTS, _FEW, _MANY = 10, 1, 11  # Arbitrary: ten operators apart, to tell blocks from operators.
_GELUS = 60  # Arbitrary: enough tensors to exceed the timer's noise.


def overheads() -> Overheads | None:
    """Return this machine's overheads, cached in the user's cache folder, or None if not measurable."""
    try:
        path = _path()
        return msgspec.json.decode(path.read_bytes(), type=Overheads)
    except RuntimeError:
        return measured()  # The user has no home folder.
    except (OSError, msgspec.DecodeError):
        if (found := measured()) is not None:
            write(path, msgspec.json.encode(found))
        return found


def measured() -> Overheads | None:
    """Measure the overheads. Returns None if other load makes the result meaningless.

    Runs in a new thread, without the caller's modes, hooks, defaults and traces.
    """
    found = None
    with isolated("technique", "recompute or replay"), ThreadPoolExecutor(1, OURS) as pool:
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
    found = Overheads(part=part, operator=operator, tensor=tensor - operator, watched=watched)
    return found if min(part, operator, found.tensor, watched) > 0.0 else None


def _path() -> Path:
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}-torch{torch.__version__}"
    return folder() / "overheads" / f"{platform.node()}-{version}.json"


class _Sigmoids(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.count):
            x = torch.sigmoid(x)
        return x


class _Gelus(nn.Module):
    """Alternating products and GELUs, which save their inputs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(_GELUS):
            x = nn.functional.gelu(x) * x
        return x


def _of_parts() -> tuple[float, float]:
    few, many = (_added(count) / _PARTS for count in (_FEW, _MANY))
    operator = (many - few) / (_MANY - _FEW)
    return few - _FEW * operator, operator


def _added(count: int) -> float:
    model = nn.Sequential(*(_Sigmoids(count) for _ in range(_PARTS)))
    plain = _seconds(model)
    return _planned_seconds(model, "recompute", [f"Net.{i}" for i in range(_PARTS)]) - plain


def _of_tensors() -> tuple[float, float]:
    model = _Gelus()
    watched = _planned_seconds(model, "replay", ["Net:gelu.999"])
    again = _planned_seconds(model, "replay", [f"Net:gelu.{i}" for i in range(_GELUS)])
    return (again - watched) / _GELUS, (watched - _seconds(model)) / (2 * _GELUS)


def _planned_seconds(model: nn.Module, name: str, places: list[str]) -> float:
    plan = Technique(name=name, where=tuple(places), equivalence="BITWISE")
    handle = technique(name).apply({"Net": model}, plan)
    try:
        return _seconds(model)
    finally:
        handle.revert()


def _seconds(model: nn.Module) -> float:
    x, taken = torch.ones(2, 2, dtype=torch.float32, device="cpu", requires_grad=True), []
    for _ in range(_ROUNDS):
        begin = time.thread_time()
        model(x).sum().backward()
        taken.append(time.thread_time() - begin)
    return min(taken)
