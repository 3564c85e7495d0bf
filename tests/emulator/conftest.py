from __future__ import annotations

from collections.abc import Iterator

import pytest

from torchtrim.emulator import Emulation, emulate


@pytest.fixture
def device() -> Iterator[Emulation]:
    """An emulated device for one test."""
    with emulate() as emulation:
        yield emulation
