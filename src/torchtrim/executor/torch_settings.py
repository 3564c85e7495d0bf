"""torch's settings that decide what operators compute: kept at a forward, and set for its rerun."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_num_threads, torch.set_num_threads),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    (torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled),
    (torch._C._get_cudnn_enabled, torch._C._set_cudnn_enabled),
    (torch._C._get_cudnn_benchmark, torch._C._set_cudnn_benchmark),
    (torch._C._get_cudnn_deterministic, torch._C._set_cudnn_deterministic),
    (torch._C._get_cudnn_allow_tf32, torch._C._set_cudnn_allow_tf32),
    (torch._C._get_math_sdp_enabled, torch._C._set_sdp_use_math),
    (torch._C._get_flash_sdp_enabled, torch._C._set_sdp_use_flash),
    (torch._C._get_mem_efficient_sdp_enabled, torch._C._set_sdp_use_mem_efficient),
)
"""The functions that get and set each of them."""


def torch_settings() -> tuple[Any, ...]:
    """Return the current settings."""
    return tuple([read() for read, _ in _SETTINGS])


@contextlib.contextmanager
def under(settings: tuple[Any, ...]) -> Iterator[None]:
    """Apply settings inside, and restore the current ones afterwards."""
    now = torch_settings()
    _change(now, settings)
    try:
        yield
    finally:
        _change(torch_settings(), now)


def _change(one: tuple[Any, ...], other: tuple[Any, ...]) -> None:
    if one != other:
        for (_, write), old, new in zip(_SETTINGS, one, other, strict=True):
            if old != new:
                write(new)
