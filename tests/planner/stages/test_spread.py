"""Layouts of a chain over devices: what they take and need, by hand."""

from __future__ import annotations

import pytest

from torchtrim.errors import InfeasibleBudget, Unsupported, UsageError
from torchtrim.pipelines.orders import order_of
from torchtrim.planner.stages.chain import Chain, Segment
from torchtrim.planner.stages.spread import Fabric, RankLayout, SimulatedLayout, spread
from torchtrim.workflows.estimate import spread_over

LAYERS = 8
QUICK = Fabric(node=4, inside=1e18, between=1e18, latency=0.0)
SLOW = Fabric(node=4, inside=1000.0, between=100.0, latency=0.0)


def chain_of(share: float) -> Chain:
    """Eight equal layers of 100 bytes of parameters; of a batch of 4."""
    one = Segment(
        "layer",
        forward=share,
        inputs=share,
        weights=share,
        update=0.5,
        given=int(10 * share),
        held=int(80 * share),
        rise=int(90 * share),
        back=int(100 * share),
        first=int(100 * share),
        gradients=100,
        state=300,
        parameters=100,
    )
    return Chain("Net", (one,) * LAYERS, 4, share)


def simulated(layout: RankLayout, fabric: Fabric = QUICK) -> SimulatedLayout:
    devices = layout.stages * layout.replicas * layout.shards
    batch = layout.samples * layout.microbatches * layout.replicas * layout.shards
    (one,) = spread(chain_of, devices, batch, 10**9, order_of, fabric, [layout])
    return one


def test_one_device_takes_the_step_as_it_is() -> None:
    one = simulated(RankLayout(1, 1, 1, 4, 1, False, True))
    assert one.seconds == pytest.approx(3 * LAYERS + 0.5 * LAYERS)
    assert one.peak_bytes == LAYERS * 400 + (LAYERS - 1) * 80 + 100 + 10 - 10
    assert one.bubble == one.exposed == 0


def test_recomputation_takes_a_forward_more_and_holds_the_inputs_alone() -> None:
    plain = simulated(RankLayout(1, 1, 1, 4, 1, False, True))
    again = simulated(RankLayout(1, 1, 1, 4, 1, True, True))
    assert again.seconds == pytest.approx(plain.seconds + LAYERS - 1)
    assert again.peak_bytes == LAYERS * 400 + (LAYERS - 1) * 10 + 100


def test_shards_divide_the_state_and_gather_three_layers() -> None:
    one = simulated(RankLayout(1, 1, 4, 4, 1, True, True))
    assert one.peak_bytes == LAYERS * 400 // 4 + 3 * 100 + (LAYERS - 1) * 10 + 100
    kept = simulated(RankLayout(1, 1, 4, 4, 1, True, False))
    assert kept.peak_bytes == one.peak_bytes - 300 + 2 * LAYERS * 100


def test_exchanges_are_hidden_behind_work_as_far_as_it_takes() -> None:
    quick = simulated(RankLayout(1, 1, 4, 4, 1, False, True))
    few = simulated(RankLayout(1, 1, 4, 4, 1, False, True), SLOW)
    assert few.seconds == pytest.approx(quick.seconds + 0.075 + 2 * 0.075)
    far = simulated(RankLayout(1, 1, 8, 4, 1, False, True), SLOW._replace(between=10.0))
    assert far.exposed > 0.5


def test_replicas_exchange_once_a_step() -> None:
    alone = simulated(RankLayout(1, 1, 1, 4, 4, False, True), SLOW)
    together = simulated(RankLayout(1, 4, 1, 4, 4, False, True), SLOW)
    hidden = 2 * LAYERS * 100 * 0.75 / 1000
    assert together.seconds == pytest.approx(alone.seconds + max(hidden - 2 * LAYERS, 0))


def test_stages_idle_as_in_the_schedule() -> None:
    stages, batches = 4, 8
    one = simulated(RankLayout(stages, 1, 1, 4, batches, False, True))
    assert one.bubble == pytest.approx((stages - 1) / (stages - 1 + batches))
    assert len(one.cuts) == stages - 1


def test_the_quickest_that_fits_is_first_and_less_memory_is_never_quicker() -> None:
    budgets = (3000, 2200, 1500, 900)
    quickest = []
    for budget in budgets:
        found = spread(chain_of, 8, 64, budget, order_of, SLOW)
        assert all(one.peak_bytes <= budget for one in found)
        assert [one.seconds for one in found] == sorted(one.seconds for one in found)
        quickest.append(found[0].seconds)
    assert quickest == sorted(quickest)


def test_all_devices_and_the_whole_batch_are_used() -> None:
    for one in spread(chain_of, 8, 64, 10**9, order_of, QUICK):
        layout = one.layout
        assert layout.stages * layout.replicas * layout.shards == 8
        assert layout.samples * layout.microbatches * layout.replicas * layout.shards == 64


def test_what_cannot_be_is_said() -> None:
    with pytest.raises(InfeasibleBudget, match="shards"):
        spread(chain_of, 8, 64, 100, order_of, QUICK)
    with pytest.raises(Unsupported, match="divided evenly"):
        spread(chain_of, 11, 64, 10**9, order_of, QUICK)
    with pytest.raises(UsageError, match="abacus"):
        spread_over(lambda: None, 8, memory="1GiB", batch=8, device="abacus")  # type: ignore[arg-type, return-value]
    with pytest.raises(UsageError, match="at least one"):
        spread_over(lambda: None, 0, memory="1GiB", batch=8)  # type: ignore[arg-type, return-value]
