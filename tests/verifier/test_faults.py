"""Faults drawn from real bugs: each is caught within three steps, and nine of ten are named."""

from __future__ import annotations

import random

import pytest
from bench import faults

import draws

ALL = list(faults.faults())


def test_each_has_a_source_and_a_place_in_its_program() -> None:
    assert len(ALL) >= 60
    for fault in ALL:
        assert fault.source.startswith("https://github.com/")
        right, wrong = fault.texts
        assert right != wrong


def test_some_are_caught() -> None:
    for fault in random.Random(draws.seed()).sample(ALL, 2):
        assert faults.try_fault(fault).certificate.verdict == "NOT EQUAL", fault.name


@pytest.mark.slow
def test_all_are_caught_and_most_are_named() -> None:
    found = [faults.try_fault(fault) for fault in ALL]
    missed = [one.fault.name for one in found if one.certificate.verdict != "NOT EQUAL"]
    assert not missed
    assert sum(one.named for one in found) >= 0.9 * len(found)
