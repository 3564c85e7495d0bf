"""The lanes of a step: the times that its waits were priced with, as columns."""

from __future__ import annotations

import functools
import json
from array import array
from itertools import pairwise

import pytest
import torch
from torch import nn

import torchtrim
from profiles import Step
from steps import squared
from torchtrim.analysis.prices import device_of
from torchtrim.capture.workload import TrainStep
from torchtrim.costs.devices import DEVICES
from torchtrim.costs.syncs import price_syncs
from torchtrim.emulator import emulate
from torchtrim.records.plan import Technique
from torchtrim.records.profile import Profile
from torchtrim.records.report import WaitCost
from torchtrim.report.lanes import CopyLanes, LaneSpan, Spans, copies_of, lanes
from torchtrim.report.perfetto import render
from torchtrim.report.timeline import copies_view
from torchtrim.step.from_profile import on_device, step_of
from torchtrim.step.links import traffic
from torchtrim.techniques.offload_activations.places import place_of
from torchtrim.techniques.offload_activations.technique import TECHNIQUE
from torchtrim.techniques.offload_activations.windows import edit_of


def waiting(device: str) -> WaitCost:
    return WaitCost(
        device=device,
        source="modelled",
        step_ms=1.0,
        device_busy_ms=1.0,
        bound="waits",
        all_saves_ms=0.0,
    )


def reads(races: bool = False) -> Profile:
    step = Step("emulated")
    weight = step.alive("parameter", 4 * 2**20)
    step.sync("synchronize", line=1)
    for number in range(30):
        made = step.op("aten::mul", weight, makes=2**number, line=number)
        if number % 7 == 0:
            step.sync("async-read" if races else "item", made)
            step.sync("item", made)
    return step.profile()


def test_columns_read_as_spans() -> None:
    spans = Spans(array("d", [0.0, 1.0, 4.0]), array("d", [1.0, 2.0, 0.5]), [7, 8, 9], "abc")
    assert list(spans) == [
        LaneSpan(0.0, 1.0, 7, "a"),
        LaneSpan(1.0, 2.0, 8, "b"),
        LaneSpan(4.0, 0.5, 9, "c"),
    ]
    assert spans[-1] == list(spans)[-1]
    assert spans[1:] == list(spans)[1:]
    assert len(spans) == 3
    with pytest.raises(IndexError):
        spans[3]
    assert [one.index for one in Spans(array("d", [0.0, 1.0]), array("d", [1.0, 1.0]))] == [0, 1]


@pytest.mark.parametrize("races", [False, True])
@pytest.mark.parametrize("device", ["a100", "t4"])
def test_the_waits_of_the_lanes_are_those_that_were_priced(device: str, races: bool) -> None:
    profile = reads(races)
    priced = price_syncs(profile, DEVICES[device])
    drawn = lanes(waiting(device), profile)
    assert 1e3 * drawn.seconds == pytest.approx(priced.cost.step_ms)
    stood = 1e3 * sum(span.seconds for span in drawn.waits)
    assert stood == pytest.approx(sum(wait.wait_ms for wait in priced.waits))
    assert {span.name for span in drawn.waits} == {"item", "synchronize"}
    starts = [span.start for span in drawn.device]
    assert starts == sorted(starts)


def test_a_device_that_is_not_known_is_drawn_as_it_was_recorded() -> None:
    drawn = lanes(waiting("abacus"), reads())
    assert (drawn.source, drawn.device_name, list(drawn.device)) == ("measured", "", [])
    assert len(drawn.host) == len(reads().operators)


def test_a_step_without_operators_has_no_lanes() -> None:
    drawn = lanes(waiting("a100"), Step("emulated").profile())
    assert drawn.seconds == 0
    assert drawn.memory == []


@functools.cache
def planned() -> tuple[Profile, Technique]:
    """A step, and a plan that offloads what it can."""
    with emulate():
        torch.manual_seed(0)
        inner = [part for _ in range(4) for part in (nn.Linear(32, 32), nn.GELU())]
        model = nn.Sequential(*inner).cuda()
        optimizer = torch.optim.SGD(model.parameters(), 1e-2)
        profile = torchtrim.record(
            TrainStep(model, squared, optimizer, torch.randn(8192, 32, device="cuda"))
        )
    step = on_device(step_of(profile), device_of(profile))
    where = tuple(one.where for one in TECHNIQUE.options(step))
    return profile, TECHNIQUE.settled(step, Technique(name=TECHNIQUE.name, where=where))


def drawn() -> CopyLanes:
    profile, technique = planned()
    found = copies_of(profile, [technique])
    assert found is not None
    return found


def test_the_lanes_are_those_of_the_plan() -> None:
    profile, technique = planned()
    found = drawn()
    step = on_device(step_of(profile), device_of(profile))
    edits = [edit for where in technique.where if (edit := edit_of(step, place_of(where)))]
    expected = traffic(step, edits)
    assert len(found.out) == len(found.home) == len(expected.trips) == len(technique.where)
    assert sum(one.seconds for one in found.awaited) == pytest.approx(expected.stall)
    assert found.awaited
    assert found.bytes == sum(trip.bytes for trip in expected.trips)
    for lane in (found.compute, found.out, found.home):
        for before, after in pairwise(lane):
            assert after.start >= before.start + before.seconds - 1e-12
    assert max(one.start + one.seconds for one in found.compute) <= found.seconds + 1e-12


def test_compute_stands_still_while_it_waits() -> None:
    found = drawn()
    for wait in found.awaited:
        middle = wait.start + wait.seconds / 2
        assert not any(one.start < middle < one.start + one.seconds for one in found.compute)


def test_the_page_says_what_hides() -> None:
    profile, _ = planned()
    view = copies_view(profile, drawn())
    assert [lane.name for lane in view.lanes] == ["compute", "out", "back", "waits"]
    assert all("path" in lane.markup for lane in view.lanes)
    assert "compute hides" in view.caption


def test_the_trace_has_tracks_for_both_directions() -> None:
    profile, technique = planned()
    trace = json.loads(render(profile, [], None, techniques=[technique]))
    tracks = {
        e["args"]["name"]: e["tid"]
        for e in trace["traceEvents"]
        if e["name"] == "thread_name" and e["pid"] == 3
    }
    assert list(tracks) == ["compute", "copies to the host", "copies back", "waits for copies"]
    counts = {
        name: sum(
            e["pid"] == 3 and e.get("tid") == tid and e["ph"] == "X" for e in trace["traceEvents"]
        )
        for name, tid in tracks.items()
    }
    found = drawn()
    assert list(counts.values()) == [
        len(found.compute),
        len(found.out),
        len(found.home),
        len(found.awaited),
    ]


def test_without_a_plan_that_copies_there_are_none() -> None:
    profile, _ = planned()
    assert copies_of(profile, []) is None
    unknown = Technique(name=TECHNIQUE.name, where=("model.head",))
    assert copies_of(profile, [unknown]) is None
    assert not [e for e in json.loads(render(profile, [], None))["traceEvents"] if e["pid"] == 3]
