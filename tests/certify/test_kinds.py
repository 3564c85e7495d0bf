"""Kinds of input on which a function differs after a fix, and those that do not count."""

from __future__ import annotations

import ast

import pytest
import torch

from torchtrim.certify import kinds
from torchtrim.certify.kinds import KindsTried, try_kinds
from torchtrim.records.probes import ObservedValue
from torchtrim.source.alone import AloneFunction, alone
from torchtrim.source.source import SourceFile

_X = ObservedValue(kind="tensor", dtype="float32", shape=(3, 4))
_MASK = ObservedValue(kind="tensor", dtype="bool", shape=(3, 4))
_LABELS = ObservedValue(kind="tensor", dtype="int64", shape=(3,))


def _function(body: str, names: str) -> AloneFunction:
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    source = SourceFile("case.py", f"import torch\n\ndef function({names}):\n{lines}")
    found = alone(source, next(source.each(ast.Return)))
    assert found is not None
    return found


def _tried(before: str, after: str, exact: bool = True, **seen: ObservedValue) -> KindsTried:
    names = ", ".join(seen)
    return try_kinds(_function(before, names), _function(after, names), [seen], exact=exact)


def test_functions_that_agree_on_all_kinds_need_no_test() -> None:
    found = _tried("return x * 2 + 1", "return 1 + 2 * x", x=_X)
    assert not found.differs
    assert found.tried >= found.accepted > 20


@pytest.mark.parametrize(
    ("before", "after", "kind"),
    [
        ("return x.sum()", "return x.sum((0, 1))", "`x` float32[2, 3, 4]"),
        ("return x + 1", "return x.float() + 1", "`x` float64[3, 4]"),
        ("return x.sum()", "return x.mean() * x.numel()", "`x` float32[0, 4]"),
        ("x.add_(1)\nreturn x.sum()", "return x.add(1).sum()", "`x` float32[3, 4]"),
        ("return torch.rand(2) + x.sum()", "return x.sum() + torch.rand(2)[[0, 0]]", "`x`"),
        ("return x.sum() + 0 * torch.rand(1)", "return x.sum() + x.new_zeros(1)", "`x`"),
    ],
)
def test_the_first_kind_that_differs_is_named(before: str, after: str, kind: str) -> None:
    exact = ".mean" not in after
    assert _tried(before, after, exact, x=_X).differs.startswith(kind)


def test_gradients_are_compared() -> None:
    graded = ObservedValue(kind="tensor", dtype="float32", shape=(3, 4), requires_grad=True)
    assert _tried("return x * 1", "return x.detach() * 1", x=graded).differs


def test_relations_of_shapes_are_varied() -> None:
    found = _tried("return x[m].sum()", "return torch.where(m, x, 0).sum()", False, x=_X, m=_MASK)
    assert found.differs
    same = "return torch.where(m.bool(), x, 0).sum()"
    again = _tried(f"m = m.bool()\n{same}", same, False, x=_X, m=_MASK)
    assert again.accepted > found.accepted


def test_a_mask_of_whole_numbers_is_an_index() -> None:
    x, m = (ObservedValue(kind="tensor", dtype=one, shape=(2, 4)) for one in ("float32", "bool"))
    found = _tried("if m.any():\n    x[m] = 0\nreturn x", "x[m] = 0\nreturn x", x=x, m=m)
    assert "`m` int64" in found.differs


def test_a_kind_on_which_the_original_raises_does_not_count() -> None:
    rows = "m = m.reshape(3, 4).bool()\nx = x.reshape(3, 4)\n"
    found = _tried(
        rows + "return x[m].sum()",
        rows + "return torch.where(m, x, 0).sum()",
        False,
        x=_X,
        m=_MASK,
    )
    assert found.accepted
    assert not found.differs


def test_a_kind_that_only_an_early_return_accepts_does_not_count() -> None:
    early = "if (y != 0).sum() < 1:\n    return x.sum() * 0\n"
    loss = "torch.nn.functional.cross_entropy(x, y)"
    found = _tried(
        f"{early}return {loss}",
        f"few = (y != 0).sum() < 1\nreturn torch.where(few, x.sum() * 0, {loss})",
        False,
        x=_X,
        y=_LABELS,
    )
    assert found.accepted
    assert not found.differs


def test_a_function_that_raises_on_the_kinds_of_the_run_accepts_none() -> None:
    found = _tried("return x.cuda_only()", "return x", x=_X)
    assert (found.accepted, found.differs) == (0, "")


def test_the_global_random_stream_is_left_alone() -> None:
    before = torch.get_rng_state()
    _tried("return x + torch.rand(1)", "return x + torch.rand(1)", x=_X)
    assert torch.equal(before, torch.get_rng_state())


def test_kinds_that_the_time_is_too_short_for_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kinds, "_LONGEST", 0.0)
    assert not _tried("return x + 1", "return 1 + x", x=_X).complete
