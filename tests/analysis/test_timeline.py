import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

import torchtrim
from models import SAMPLES, train
from profiles import Step, training_step
from torchtrim.analysis.timeline import (
    by_kind,
    by_module,
    kinds_over_time,
    most_of,
    peak_operator,
    peak_without,
    timeline,
)
from torchtrim.records.profile import KINDS, Profile, Storage


@st.composite
def profiles(draw: st.DrawFn) -> Profile:
    transients = draw(st.lists(st.integers(0, 50), max_size=12))
    step = Step()
    for transient in transients:
        step.op("aten::op", transient=transient)
    count = len(transients)
    lives = draw(
        st.lists(
            st.tuples(
                st.integers(0, 40),
                st.sampled_from(KINDS),
                st.integers(-1, count - 1),
                st.integers(0, count),
            ),
            max_size=15,
        )
    )
    storages = [
        Storage(size, kind, birth, death, "cpu", "")
        for size, kind, birth, death in lives
        if birth < death
    ]
    return replace(step.profile(), storages=storages)


def slow_timeline(profile: Profile) -> tuple[list[int], list[int]]:
    live, high = [], []
    for i, op in enumerate(profile.operators):
        after = sum(s.bytes for s in profile.storages if s.birth <= i < s.death)
        before = sum(s.bytes for s in profile.storages if s.birth < i < s.death)
        live.append(after)
        high.append(max(after, before + op.transient_bytes))
    return live, high


@given(profiles())
def test_timeline_agrees_with_counting_at_each_operator(profile: Profile) -> None:
    live, high = timeline(profile)
    assert (live, high) == slow_timeline(profile)


@given(profiles())
def test_peak_is_the_first_highest(profile: Profile) -> None:
    _, high = slow_timeline(profile)
    peak = peak_operator(profile)
    if not high:
        assert peak == -1
    else:
        assert high[peak] == max(high)
        assert max(high[:peak], default=-1) < high[peak]


@given(profiles())
def test_kinds_add_up_to_the_highest_bytes_of_each_operator(profile: Profile) -> None:
    _, high = slow_timeline(profile)
    for i, top in enumerate(high):
        kinds = by_kind(profile, i)
        assert sum(kinds.values()) == top
        for kind in KINDS:
            assert kinds[kind] == sum(
                s.bytes for s in profile.storages if s.kind == kind and s.birth <= i < s.death
            )


@given(profiles(), st.integers(1, 15))
def test_samples_are_in_order_keep_the_peak_and_agree_with_by_kind(
    profile: Profile, points: int
) -> None:
    samples = kinds_over_time(profile, points)
    operators = [sample.operator for sample in samples]
    assert operators == sorted(set(operators))
    assert len(samples) == min(points, len(profile.operators))
    assert all(sample.by_kind == by_kind(profile, sample.operator) for sample in samples)
    _, high = slow_timeline(profile)
    assert max((high[i] for i in operators), default=0) == max(high, default=0)


@given(profiles(), st.data())
def test_peak_without_storages_is_between_zero_and_the_peak(
    profile: Profile, data: st.DataObject
) -> None:
    _, high = slow_timeline(profile)
    indices = range(len(profile.storages))
    removed = data.draw(st.sets(st.sampled_from(indices))) if indices else set()
    rest = peak_without(profile, removed)
    size = sum(profile.storages[i].bytes for i in removed)
    assert max(max(high, default=0) - size, 0) <= rest <= max(high, default=0)
    if not removed:
        assert rest == max(high, default=0)


def test_what_dies_before_an_operator_does_not_count_during_it() -> None:
    step = Step()
    first = step.op("aten::a", makes=100)
    step.op("aten::b", makes=10)
    step.free(first)
    step.op("aten::c", makes=1)
    assert timeline(step.profile()).live == [100, 110, 11]


def test_scratch_of_an_operator_is_on_top_of_what_was_alive_going_in() -> None:
    step = Step()
    step.alive("parameter", 1000)
    step.op("aten::convolution", makes=10, transient=250)
    profile = step.profile()
    assert timeline(profile).high == [1250]
    assert by_kind(profile, 0)["workspace"] == 240


def test_a_transient_less_than_the_outputs_does_not_hide_them() -> None:
    step = Step()
    step.op("aten::view_as_new", makes=64, transient=0)
    assert timeline(step.profile()).high == [64]


def test_before_the_step_only_what_was_alive_counts() -> None:
    step = Step()
    step.alive("parameter", 7)
    step.op("aten::a", makes=100)
    kinds = by_kind(step.profile(), -1)
    assert kinds.pop("parameter") == 7
    assert not any(kinds.values())


def test_the_price_of_one_storage_is_capped_by_the_next_highest_moment() -> None:
    step = Step()
    large = step.op("aten::a", makes=100)
    step.free(large)
    step.op("aten::b", makes=90)
    profile = step.profile()
    assert peak_without(profile, [large.out]) == 90


def test_a_step_without_operators() -> None:
    profile = Step().profile()
    assert timeline(profile) == ([], [])
    assert peak_operator(profile) == -1
    assert kinds_over_time(profile) == []
    assert peak_without(profile, []) == 0


def test_training_memory_rises_in_forward_and_falls_in_backward() -> None:
    profile = training_step(blocks=4)
    live = timeline(profile).live
    forward = [i for i, op in enumerate(profile.operators) if op.phase == "forward"]
    assert [live[i] for i in forward] == sorted(live[i] for i in forward)
    assert profile.operators[peak_operator(profile)].phase == "backward"


def recorded(name: str) -> Profile:
    torch.manual_seed(0)
    sample = SAMPLES[name]()
    optimizer = torch.optim.Adam(sample.model.parameters(), 1e-3)
    return torchtrim.measure(lambda: train(sample, optimizer), device="cpu").profile


@pytest.mark.parametrize("name", ["resnet", "tied", "lstm"])
def test_they_add_up_to_the_peak(name: str) -> None:
    profile = recorded(name)
    found = by_module(profile)
    assert sum(found.values()) == max(timeline(profile).high)
    assert list(found.values()) == sorted(found.values(), reverse=True)
    assert set(found) - {"", "Adam"} <= {module.path for module in profile.modules}


def test_most_of_a_kind_is_what_is_alive_at_once() -> None:
    profile = recorded("resnet")
    parameters = sum(s.bytes for s in profile.storages if s.kind == "parameter")
    assert most_of(profile, "parameter") == parameters
    assert most_of(profile, "gradient") == parameters


def test_at_any_operator() -> None:
    profile = recorded("resnet")
    before = by_module(profile, at=0)
    assert sum(before.values()) < sum(by_module(profile, at=peak_operator(profile)).values())
