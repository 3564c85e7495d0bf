"""Data loading that keeps up with the step: prefetching, narrow transfers and loader tuning.

`torchtrim.data.model` can be imported without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchtrim.data.narrowing import narrow as narrow
    from torchtrim.data.prefetcher import Prefetcher as Prefetcher
    from torchtrim.data.tuner import Tuned as Tuned
    from torchtrim.data.tuner import tune as tune

_HOMES = {"Prefetcher": "prefetcher", "Tuned": "tuner", "narrow": "narrowing", "tune": "tuner"}
__all__ = ["Prefetcher", "Tuned", "narrow", "tune"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
