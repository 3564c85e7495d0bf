import pytest

from profiles import Step
from torchtrim.records.profile import Profile
from torchtrim.rules.tt605_uneven_memory import across

MIB = 2**20


def rank(number: int, kept: int = 0) -> Profile:
    """A step of eight mebibytes, and what the rank keeps besides."""
    step = Step()
    step.alive("parameter", 8 * MIB, name="Net.weight")
    if kept:
        step.op("aten::clone", makes=kept, line=9)
    step.op("aten::mm", line=10)
    return step.profile(rank=number)


def test_a_rank_that_keeps_more() -> None:
    (finding,) = across([rank(0), rank(1, kept=2 * MIB), rank(2)])
    assert (finding.code, finding.path, finding.line) == ("TT605", "train.py", 9)
    assert finding.price_bytes == 2 * MIB
    assert finding.message.startswith("rank 1 peaks at 10.0 MiB, 2.00 MiB over rank 0: most of it")


@pytest.mark.parametrize("kept", [0, MIB // 2])
def test_ranks_that_need_about_the_same(kept: int) -> None:
    assert not [*across([rank(0, kept=kept), rank(1)])]


def test_one_rank_alone_is_not_uneven() -> None:
    assert not [*across([rank(0, kept=4 * MIB)])]
