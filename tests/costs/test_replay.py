"""The replay against a machine that knows the truth: the span, and the span without some waits."""

import math
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import draws
from torchtrim.costs.replay import (
    Activity,
    Does,
    OneStream,
    Replayed,
    ReplayProgram,
    ReplayStep,
    bound,
    price,
    replay,
)
from torchtrim.records.trace import Trace
from torchtrim.traces.build import build
from torchtrim.traces.sites import sites_of
from torchtrim.traces.waiting import find_waits

from .machines import Backward, Kernel, Machine, Order, Read, Synchronize, Work

NOISE_US, NOISE = 40.0, 0.02


def program_of(trace: Trace) -> tuple[ReplayProgram, dict[int, int]]:
    """The program, and the number of the site for each place of a machine's program."""
    sites = sites_of(trace, find_waits(trace), None)
    numbers = {id(call): i for i, site in enumerate(sites) for call in site.calls}
    places = {int(site.op.rpartition("_")[2]): i for i, site in enumerate(sites)}
    return build(trace, numbers), places


def agrees(predicted: float, truth: float) -> bool:
    return abs(predicted - truth) <= NOISE_US + NOISE * truth


def check(program: tuple[object, ...], folder: Path) -> None:
    """The replay gives the machine's span, with all waits and without each, and without all."""
    machine = Machine()
    truth = machine.run(program)
    rebuilt, places = program_of(machine.made.trace(folder))
    begin = rebuilt.begin
    assert agrees(replay(rebuilt).span + begin, truth)
    for removed in (*({place} for place in places), set(places)):
        expected = Machine(without=removed).run(program)
        predicted = replay(rebuilt, {places[p] for p in removed}).span + begin
        assert agrees(predicted, expected), (removed, predicted, expected, truth)


def test_a_wait_that_the_next_takes_over(tmp_path: Path) -> None:
    """Removing the long wait alone gains nothing: the next read waits for the same kernels."""
    step = (*(Kernel(500.0) for _ in range(10)), Read(1), Work(10), Read(2), Work(2000.0))
    program = step * 3
    check(program, tmp_path)
    machine = Machine()
    machine.run(program)
    rebuilt, places = program_of(machine.made.trace(tmp_path))
    base = replay(rebuilt)
    alone = [base.span - replay(rebuilt, {site}).span for site in places.values()]
    both = base.span - replay(rebuilt, set(places.values())).span
    assert base.waited[places[1]] > 10_000
    assert max(alone) < 200
    assert both > 3000


def test_two_streams_and_an_event(tmp_path: Path) -> None:
    step = (
        *(Kernel(300.0, 7) for _ in range(5)),
        Order(after=7, stream=20),
        *(Kernel(200.0, 20) for _ in range(5)),
        *(Kernel(100.0, 7) for _ in range(3)),
        Order(after=20, stream=7),
        Kernel(50.0, 7),
        Read(1, 7),
        Work(500),
    )
    check(step * 3, tmp_path)


def test_a_backward_thread(tmp_path: Path) -> None:
    """A wait in backward keeps the forward thread from its next step, and its removal frees it."""
    backward = (*[Kernel(400.0), Work(40)] * 6, Read(2), Work(900.0), Kernel(300.0))
    step = (*(Kernel(400.0) for _ in range(6)), Backward(backward), Work(100), Kernel(50), Read(1))
    check((*step, Work(300)) * 3, tmp_path)


def test_an_infinitely_fast_host_and_device(tmp_path: Path) -> None:
    machine = Machine()
    machine.run((Work(1000.0), Kernel(5000.0), Read(1)) * 3)
    rebuilt, _ = program_of(machine.made.trace(tmp_path))
    assert replay(rebuilt, device=0.0).span == pytest.approx(3000, abs=200)
    assert replay(rebuilt, host=0.0).span == pytest.approx(15000, abs=200)


def test_work_that_nothing_launched_stays(tmp_path: Path) -> None:
    """The device is busy with what came before the trace; a wait at once returns when that is done."""
    machine = Machine()
    machine.free[7] = 5000.0
    machine.made.activity("before", 10.0, 4990.0, None)
    machine.run((Kernel(100.0), Read(1), Work(200.0)))
    trace = machine.made.trace(tmp_path)
    rebuilt, places = program_of(trace)
    base = replay(rebuilt)
    assert base.span == pytest.approx(rebuilt.span, rel=0.01)
    assert base.waited[places[1]] == pytest.approx(5100, rel=0.02)
    assert base.span - replay(rebuilt, {places[1]}).span == pytest.approx(200, abs=30)


def test_a_graph_moves_as_one() -> None:
    nodes = (
        Activity(0, 0, 100.0, 5.0, 1.0),
        Activity(1, 0, 100.0, 0.0, 0.0, anchor=0, offset=110.0),
        Activity(2, 1, 50.0, 0.0, 0.0, anchor=0, offset=120.0),
    )
    program = ReplayProgram(lanes=1, streams=2, activities=3, tails=[0.0])
    program.steps.append(ReplayStep(Does.LAUNCH, 0, 1000.0, 4.0, nodes))
    assert replay(program).span == 1000 + 5 + 110 + 100


_STEPS = st.one_of(
    st.builds(Work, st.floats(20, 600)),
    st.builds(Kernel, st.floats(5, 800), st.just(7)),
    st.builds(Kernel, st.floats(5, 800), st.just(7)),
    st.builds(Read, st.integers(1, 3)),
    st.builds(Synchronize, st.integers(4, 5)),
)
_STREAMS = st.one_of(
    st.builds(Work, st.floats(20, 600)),
    st.builds(Kernel, st.floats(5, 800), st.sampled_from((7, 20))),
    st.builds(Read, st.integers(1, 3), st.sampled_from((7, 20))),
)


@settings(max_examples=draws.count(150), deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(_STEPS, min_size=12, max_size=40), st.booleans())
def test_any_program(tmp_path: Path, steps: list[object], engine: bool) -> None:
    """Spans with and without any of the waits, of random programs on one stream, a thread or two."""
    assume(any(isinstance(one, Read | Synchronize) for one in steps))
    warm = tuple([Kernel(50.0), Work(200.0)] * 3 + [Kernel(300.0)] * 6 + [Work(2500.0)])
    body = tuple(steps)
    program = (
        (*warm, Kernel(100.0), Backward(body), Work(50.0), Kernel(20.0)) if engine else warm + body
    )
    check(program, tmp_path)


@settings(max_examples=draws.count(150), deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(_STREAMS, min_size=12, max_size=40))
def test_any_program_on_two_streams(tmp_path: Path, steps: list[object]) -> None:
    assume(any(isinstance(one, Read) for one in steps))
    warm = tuple([Kernel(50.0), Work(200.0), Kernel(50.0, 20), Work(200.0)] * 3)
    check((*warm, *[Kernel(300.0)] * 6, Work(2500.0), *steps), tmp_path)


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
