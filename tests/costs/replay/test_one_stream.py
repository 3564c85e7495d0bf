"""One thread and one stream: the short way gives what the long way gives, operator by operator."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import draws
from torchtrim.costs.replay.bound import bound
from torchtrim.costs.replay.engine import Replayed, replay
from torchtrim.costs.replay.one_stream import OneStream
from torchtrim.costs.replay.program import Activity, Does, ReplayProgram, ReplayStep
from torchtrim.costs.replay.sets import price

LAUNCH, GAP, BACK = 8.0, 1.5, 5.0
COSTS = st.tuples(
    st.sampled_from([0.0, 5.0, 11.0, 300.0]),
    st.sampled_from([0.0, 2.0, 40.0, 2500.0]),
    st.lists(st.integers(-1, 3), max_size=2),
)
PROGRAMS = st.lists(COSTS, max_size=30)


def short(drawn: list) -> OneStream:
    return OneStream(
        host=[own for own, _, _ in drawn],
        device=[work for _, work, _ in drawn],
        launch=LAUNCH,
        gap=GAP,
        back=BACK,
        after=[i for i, (_, _, sites) in enumerate(drawn) for _ in sites],
        sites=[site for _, _, sites in drawn for site in sites],
    )


def long(drawn: list) -> ReplayProgram:
    """The same as the steps of a trace, in which each operator is one."""
    program = ReplayProgram(lanes=1, streams=1, activities=len(drawn), tails=[0.0])
    last = -1
    for number, (own, work, sites) in enumerate(drawn):
        launches: tuple[Activity, ...] = ()
        if work:
            last = number
            launches = (Activity(number, 0, work, LAUNCH, GAP),)
        program.steps.append(ReplayStep(Does.LAUNCH, 0, 0.0, own, launches))
        awaits = (last,) if last >= 0 else ()
        program.steps += [
            ReplayStep(Does.WAIT, 0, 0.0, 0.0, awaits=awaits, back=BACK, site=site)
            for site in sites
        ]
    return program


def same(one: Replayed, other: Replayed) -> None:
    assert one.span == pytest.approx(other.span)
    assert one.waited == pytest.approx(other.waited)


@settings(max_examples=draws.count(300))
@given(PROGRAMS, st.sets(st.integers(0, 3)))
def test_a_replay_is_that_of_every_operator_for_itself(drawn: list, without: set[int]) -> None:
    for host, device in ((1.0, 1.0), (0.0, 1.0), (1.0, 0.0), (0.5, 2.0)):
        same(
            replay(short(drawn), without, host=host, device=device),
            replay(long(drawn), without, host=host, device=device),
        )


@settings(max_examples=draws.count(100))
@given(PROGRAMS)
def test_prices_and_the_verdict_are_the_same(drawn: list) -> None:
    found, expected = (price(program, range(4)) for program in (short(drawn), long(drawn)))
    assert found.alone == pytest.approx(expected.alone)
    assert found.together == pytest.approx(expected.together)
    span = expected.base.span
    verdicts = {
        bound(program, gained=expected.together, span=span, loading=0.0)
        for program in (short(drawn), long(drawn))
    }
    assert len(verdicts) == 1


@settings(max_examples=draws.count(100))
@given(PROGRAMS)
def test_the_moments_are_those_of_the_replay(drawn: list) -> None:
    program = short(drawn)
    moments = program.moments()
    ends = [
        start + work
        for start, work in zip(moments.device, program.device, strict=True)
        if not math.isnan(start)
    ]
    host = [start + own for start, own in zip(moments.host, program.host, strict=True)]
    base = replay(program)
    assert max([*ends, *host, *moments.until], default=0.0) == pytest.approx(base.span)
    assert sum(math.isnan(start) for start in moments.device) == program.device.count(0.0)
    stood: dict[int, float] = {}
    for site, at, until in zip(program.sites, moments.waits, moments.until, strict=True):
        assert until >= at
        if site >= 0:
            stood[site] = stood.get(site, 0.0) + until - at
    assert stood == pytest.approx(base.waited)


def test_many_operators_between_two_waits_are_one_step() -> None:
    program = short([(5.0, 40.0, [])] * 1000 + [(5.0, 0.0, [0])])
    assert len(program.steps) == 2
    assert replay(program).waited[0] == pytest.approx(8 + 1000 * 41.5 - 1.5 + 5 - 1001 * 5)
