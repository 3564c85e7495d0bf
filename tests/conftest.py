"""What holds for every test."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def no_work_space_is_left() -> Iterator[None]:
    """Attention keeps its work space for the next call, and what is alive counts in every peak."""
    yield
    compiled = sys.modules.get("torchtrim.attention.compiled")
    if compiled is not None:
        compiled._kept.buffers = None


@pytest.fixture
def processes_are_not_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """For what counts bytes in a process of its own: the tables of coverage.py grow there too."""
    monkeypatch.delenv("COVERAGE_PROCESS_CONFIG", raising=False)
