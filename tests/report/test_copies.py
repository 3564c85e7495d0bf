"""Lanes of a plan's copies: what hides behind what, on the page and in the trace."""

from __future__ import annotations

import functools
import json
from itertools import pairwise

import pytest
import torch
from torch import nn

import torchtrim
from steps import squared
from torchtrim.analysis.prices import device_of
from torchtrim.capture.workload import TrainStep
from torchtrim.emulator import emulate
from torchtrim.records.plan import Technique
from torchtrim.records.profile import Profile
from torchtrim.report.copies import CopyLanes, copies_of
from torchtrim.report.perfetto import render
from torchtrim.report.timeline import copies_view
from torchtrim.step.costs import on_device
from torchtrim.step.from_profile import step_of
from torchtrim.step.links import traffic
from torchtrim.techniques.offload_activations.places import place_of
from torchtrim.techniques.offload_activations.technique import TECHNIQUE
from torchtrim.techniques.offload_activations.windows import edit_of


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
    assert "hide behind compute" in view.said


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
