"""Inputs of any rank and type, derived from a case's inputs, and the lines that run on them."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import torch

Inputs = dict[str, Any]


def foreign(rng: random.Random, inputs: Inputs) -> Inputs:
    """Return the inputs with other ranks and types, of all or only one, and flags flipped."""
    turned = rng.random() < 0.5
    changed = {
        name: not value if isinstance(value, bool) and turned else value
        for name, value in inputs.items()
    }
    for _ in range(rng.randint(1, 4)):
        change = rng.choice(_CHANGES)
        alone = rng.random() < 0.5
        names = [rng.choice(list(changed))] if alone else list(changed)
        seed = rng.random()
        for name in names:
            changed[name] = _on_tensors(changed[name], change, seed)
    return changed


def _on_tensors(
    value: Any, change: Callable[[torch.Tensor, float], torch.Tensor], seed: float
) -> Any:
    if isinstance(value, list | tuple):
        short = {_one_of: 1, _first: 1, _none: 0}.get(change, len(value))
        plain = not any(isinstance(one, torch.Tensor) for one in value)
        return type(value)(
            _on_tensors(one, change, seed) for one in value[: short if plain else None]
        )
    if not isinstance(value, torch.Tensor):
        return value
    new = change(value.detach(), seed).clone()
    return new.requires_grad_(value.requires_grad and new.is_floating_point())


def _more_rows(value: torch.Tensor, seed: float) -> torch.Tensor:
    return torch.stack([value] * (1 + (seed > 0.3))) if value.dim() < 5 else value


def _more_columns(value: torch.Tensor, seed: float) -> torch.Tensor:
    return torch.stack([value] * (1 + (seed > 0.3)), -1) if value.dim() < 5 else value


def _one_of(value: torch.Tensor, seed: float) -> torch.Tensor:
    flat = value.flatten()
    return flat[int(seed * len(flat))] if len(flat) else value.new_zeros(())


def _first(value: torch.Tensor, _: float) -> torch.Tensor:
    return value[0] if value.dim() and len(value) else value


def _none(value: torch.Tensor, _: float) -> torch.Tensor:
    return value[:0] if value.dim() else value


def _cast(value: torch.Tensor, seed: float) -> torch.Tensor:
    """Draw another type of the same kind; now and then of another kind."""
    kinds = (_FLOATS, _INTEGERS, (torch.bool, torch.uint8), _COMPLEX)
    own = next(kind for kind in kinds if value.dtype in kind)
    choices = own if seed < 0.75 else (*_FLOATS, *_INTEGERS, torch.bool, *_COMPLEX)
    small = value.nan_to_num().clamp(-99, 99) if own is _FLOATS else value.real
    changed = small.to(choices[int(seed * 1000) % len(choices)])
    return changed + 0.5j if changed.is_complex() else changed


def _same(value: torch.Tensor, seed: float) -> torch.Tensor:
    """Make all elements equal: a full mask or an empty one, one label."""
    filled = torch.zeros_like(value) if seed < 0.5 else torch.ones_like(value)
    return filled if value.dtype == torch.bool or seed < 0.1 or seed > 0.9 else value


def _odd(value: torch.Tensor, seed: float) -> torch.Tensor:
    """Make some elements NaN, infinite or a zero of either sign."""
    if not value.is_floating_point():
        return value
    changed = value.clone(memory_format=torch.contiguous_format)
    for number, what in enumerate((float("nan"), float("inf"), float("-inf"), -0.0, 0.0)):
        if seed < 0.5 or number == int(seed * 1000) % 5:
            changed.view(-1)[number + int(seed * 100) % 3 :: 7] = what
    return changed


_CHANGES = (_more_rows, _more_columns, _one_of, _first, _none, _cast, _same, _odd)
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
_COMPLEX = (torch.complex64, torch.complex128)


FEW_REDRAWN, MANY_REDRAWN = 3, 30
"""Draws of values that show which lines run on a kind of input, and on the kinds of the evidence."""


def lines_of(
    raises: Callable[[Inputs], bool], rng: random.Random, inputs: Inputs, times: int
) -> set[int]:
    """Return the lines of the code that run without an error on inputs or on other values of their kinds."""
    reached: set[int] = set()
    for _ in range(times):
        ran, failed = _lines_run("case.py", partial(raises, inputs))
        reached |= set() if failed else ran
        inputs = {name: _redrawn(rng, value) for name, value in inputs.items()}
    return reached


def _redrawn(rng: random.Random, value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    if value.dtype == torch.bool:
        return torch.rand(value.shape, generator=generator) < rng.choice((0.0, 0.5, 1.0))
    if value.is_floating_point() or value.is_complex():
        drawn = torch.randn(value.shape, generator=generator).to(value.dtype)
        return drawn.requires_grad_(value.requires_grad)
    return torch.randint(0, 3, value.shape, generator=generator).to(value.dtype)


def _lines_run(path: str, call: Callable[[], bool]) -> tuple[set[int], bool]:
    ran: set[int] = set()
    before = sys.gettrace()
    sys.settrace(partial(_note_line, path, ran))
    try:
        return ran, call()
    finally:
        sys.settrace(before)


def _note_line(path: str, ran: set[int], frame: FrameType, event: str, _: object) -> Any:
    if frame.f_code.co_filename != path:
        return None
    if event == "line":
        ran.add(frame.f_lineno)
    return partial(_note_line, path, ran)
