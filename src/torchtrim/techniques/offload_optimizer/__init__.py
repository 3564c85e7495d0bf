"""Optimizer offload; see `technique.py`."""

from __future__ import annotations

import warnings
from typing import Any


def __getattr__(name: str) -> Any:
    """Return `TECHNIQUE`, for imports from before the technique was a package."""
    if name != "TECHNIQUE":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from torchtrim.techniques.offload_optimizer.technique import TECHNIQUE

    warnings.warn(f"import TECHNIQUE from {__name__}.technique", DeprecationWarning, stacklevel=2)
    return TECHNIQUE
