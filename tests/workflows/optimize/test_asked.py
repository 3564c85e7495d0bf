"""Techniques that are measured: which of their ways are tried, and which a person may pin."""

from __future__ import annotations

import msgspec
import pytest

from profiles import exchanging_step
from torchtrim.errors import UsageError
from torchtrim.records.terms import allowance
from torchtrim.records.trial import Request, Trial
from torchtrim.workflows.optimize.levers import may_shard
from torchtrim.workflows.optimize.trials import choices, pinned_choice


def job(ranks: int) -> Trial:
    """Replicas on so many ranks; sums over more than two may be rounded otherwise in shards."""
    profile = exchanging_step([(2**20, 0.3), (3 * 2**20, 0.5)])
    collectives = tuple(msgspec.structs.replace(one, ranks=ranks) for one in profile.collectives)
    profile = msgspec.structs.replace(profile, world=ranks, collectives=collectives)
    alone = Trial(request=Request(), profile=profile)
    return msgspec.structs.replace(alone, ranks=(alone,) * ranks)


@pytest.mark.parametrize(
    ("ranks", "allow", "ways"), [(2, "bitwise", 2), (4, "bitwise", 0), (4, "rounding", 2)]
)
def test_ways_that_round_are_tried_where_that_is_allowed(ranks: int, allow: str, ways: int) -> None:
    original = job(ranks)
    assert len(choices(original, ["shard"], (), allowance(allow))) == ways
    assert may_shard(original, allowance(allow), ()) == bool(ways)
    assert not may_shard(original, allowance(allow), ("shard",))


def test_a_pin_that_rounds_asks_for_what_allows_it() -> None:
    pins = {"shard": ["DDP"]}
    with pytest.raises(UsageError, match="shard, which rounds here: give --allow rounding too"):
        pinned_choice(job(4), pins, allowance("bitwise"))
    (pinned,) = pinned_choice(job(4), pins, allowance("rounding"))
    assert (pinned.name, pinned.where, pinned.equivalence) == ("shard", ("DDP",), "ROUNDING")


def test_a_pin_that_makes_another_function_has_to_be_named() -> None:
    pins = {"compress_gradients": ["DDP"]}
    with pytest.raises(UsageError, match="give --allow semantic=compress_gradients too"):
        pinned_choice(job(2), pins, allowance("rounding"))
