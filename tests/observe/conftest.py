from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def nothing_from_before() -> Iterator[None]:
    """What lives already is not seen by the garbage collector: not by scans, not by collections."""
    gc.freeze()
    yield
    gc.unfreeze()
