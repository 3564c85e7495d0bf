"""The table of waits: each row waits in one case and not in another, has a source and known operators."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from syncs.cases import CASES, MASK, X, ask, indexed
from torchtrim.syncs.base import Row
from torchtrim.syncs.lookup import ROWS, holds, row, rows_for
from torchtrim.syncs.pages import FREE, WAITING

ASKED = [one for one in ROWS if one.operators and holds(one, torch.__version__)]


@pytest.mark.parametrize("name", CASES)
def test_a_row_waits_as_often_as_its_source_does(name: str) -> None:
    for asked, times in CASES[name]:
        assert int(row(name).waits(asked)) == times, asked.name
    assert {bool(times) for _, times in CASES[name]} == {True, False}


@pytest.mark.parametrize("name", CASES)
def test_a_row_is_asked_about_its_cases(name: str) -> None:
    for asked, _ in CASES[name]:
        assert row(name) in rows_for(asked.name, torch.__version__)


def test_every_row_that_is_asked_has_cases() -> None:
    assert set(CASES) == {one.name for one in ASKED}


def test_names_are_unique() -> None:
    assert len({one.name for one in ROWS}) == len(ROWS)


@pytest.mark.parametrize("one", ROWS, ids=lambda one: one.name)
def test_a_row_has_a_source_and_says_what_to_do(one: Row) -> None:
    assert one.evidence
    assert re.fullmatch(r"TT10[1-5]", one.code)
    assert all((one.what, one.when, one.advice))
    for found in one.evidence:
        assert found.line > 0
        assert found.note
        assert f"/{found.ref}/{found.path}#L{found.line}" in found.url


@pytest.mark.parametrize("one", ASKED, ids=lambda one: one.name)
def test_operators_exist(one: Row) -> None:
    for operator in one.operators:
        if not operator.startswith("aten::"):
            continue
        name, _, overload = operator.removeprefix("aten::").partition(".")
        if holds(one, torch.__version__):
            packet = getattr(torch.ops.aten, name)
            assert not overload or overload in packet.overloads()


def test_a_row_without_operators_never_waits_by_itself() -> None:
    for one in ROWS:
        if not one.operators:
            assert not one.waits(ask("aten::nonzero", X, self=X))


def test_an_operator_that_no_row_knows_has_none() -> None:
    assert rows_for("aten::add.Tensor", "2.13.0") == ()
    assert rows_for("aten::nonzero_static", "2.13.0") == ()


def test_an_overload_may_be_named_or_not() -> None:
    assert rows_for("aten::nonzero", "2.13.0") == rows_for("aten::nonzero.default", "2.13.0") != ()
    assert rows_for("aten::fill_.Scalar", "2.13.0") == ()


def test_operators_of_two_rows_wait_for_both() -> None:
    host = torch.tensor([0, 1, 2])
    mask = MASK[:, 0].clone()
    asked = indexed([mask, host], X, mask)
    assert sum(int(one.waits(asked)) for one in rows_for(asked.name, "2.13.0")) == 2


def test_versions_bound_a_row() -> None:
    later = replace(ROWS[0], since="2.12")
    sooner = replace(ROWS[0], until="2.12")
    versions = ("2.11.1", "2.12.0", "2.13.0+cpu")
    assert [holds(later, version) for version in versions] == [False, True, True]
    assert [holds(sooner, version) for version in versions] == [True, False, False]


def test_what_comes_down_to_rows_names_them() -> None:
    assert all(row(idiom.row) for idiom in WAITING)
    assert not any(idiom.row for idiom in FREE)
