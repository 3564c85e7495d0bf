"""Faults drawn from real bugs: each is caught within three steps, and nine of ten are named."""

from __future__ import annotations

import json
import random
import re

import pytest
from bench import faults
from bench.machine import RESULTS

import draws

ALL = list(faults.faults())


def test_each_has_a_source_and_a_place_in_its_program() -> None:
    assert len(ALL) >= 60
    for fault in ALL:
        assert fault.source.startswith("https://github.com/")
        right, wrong = fault.texts
        assert right != wrong


def test_the_table_in_the_documentation_is_that_of_the_last_run() -> None:
    found = json.loads((RESULTS / "amd-epyc-2-cores" / "faults.json").read_text())
    assert {one["name"] for one in found["faults"]} == {one.name for one in ALL}
    figures = found["figures"]
    assert figures == faults.table({one["name"]: one for one in found["faults"]})
    page = (RESULTS.parent.parent / "docs" / "certificates.md").read_text()
    (every,) = re.findall(r"\| who looks \| catches, of (\d+) \|", page)
    rows = re.findall(r"^\| (.+) \| (\d+) \|$", page, re.MULTILINE)
    named = ("certificate", "assert_close on the loss", "loss curve at 1e-4", "an exception")
    assert [int(count) for _, count in rows] == [
        *(figures[name] for name in named),
        figures["checkpoint's determinism check"],
    ]
    assert int(every) == figures["faults"] == figures["certificate"]
    assert f"setting or input in {figures['named']}." in page


def test_some_are_caught() -> None:
    for fault in random.Random(draws.seed()).sample(ALL, 2):
        assert faults.try_fault(fault).certificate.verdict == "NOT EQUAL", fault.name


@pytest.mark.slow
def test_all_are_caught_and_most_are_named() -> None:
    found = [faults.try_fault(fault) for fault in ALL]
    missed = [one.fault.name for one in found if one.certificate.verdict != "NOT EQUAL"]
    assert not missed
    assert sum(one.named for one in found) >= 0.9 * len(found)
