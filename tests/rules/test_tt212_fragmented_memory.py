from __future__ import annotations

import pytest
import torch
from msgspec.structs import replace

from profiles import Step
from torchtrim.emulator import emulate
from torchtrim.emulator.runtime import MODELS
from torchtrim.records.profile import Profile
from torchtrim.rules.tt212_fragmented_memory import check

MIB = 2**20


def growing(reserved: int | None) -> Profile:
    """Blocks of 30, 40 and 50 MiB, each freed before the next, which fits into no segment before."""
    step = Step()
    for size in (30, 40, 50):
        step.free(step.op("aten::mm", makes=size * MIB))
    return replace(step.profile(), reserved_bytes=reserved)


def test_freed_segments_are_priced_by_what_expandable_ones_reserve() -> None:
    (found,) = check(growing(120 * MIB))
    assert found.price_bytes == 120 * MIB - 60 * MIB  # in pages of 20 MiB
    assert found.message.startswith("120 MiB is reserved for a peak of 50.0 MiB")
    assert "expandable_segments:True" in found.message


def test_a_run_that_reserves_less_is_fine() -> None:
    assert not list(check(growing(50 * MIB)))


def test_a_cpu_reserves_nothing() -> None:
    assert not list(check(growing(None)))


@pytest.mark.parametrize("variable", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_the_emulated_allocator_takes_its_settings_from_the_environment(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reserved() -> int:
        with emulate(MODELS["a100"]):
            for size in (30, 40, 50):
                torch.empty(size * MIB, dtype=torch.uint8, device="cuda")
            return torch.cuda.memory_reserved()

    plain = reserved()
    monkeypatch.setenv(variable, "expandable_segments:True")
    assert reserved() < plain
