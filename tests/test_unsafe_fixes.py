"""`bench.unsafe_fixes`: what it calls, and what it sees."""

from __future__ import annotations

import ast
import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
from bench import unsafe_calls as calls
from bench.unsafe_fixes import broken, changed_lines
from bench.unsafe_loading import pairs_of
from bench.unsafe_written import unit_at, units

HEAD = "import torch\n"
BEFORE = f"""{HEAD}
def scaled(points: torch.Tensor, sizes, factor: float = 2.0, flag=False):
    for n in range(len(sizes)):
        points = points + min(sizes[n], 3) * factor
    return points if flag else points * 2

class Counter:
    def __init__(self, start: int = 0):
        self.start = start

    @torch.no_grad()
    def count(self, mask: torch.Tensor):
        self.start += int(mask.sum())
        return self.start + torch.rand(())
"""
FAULTS = {
    "raises": ("sizes[n]", "sizes[n.view(1)][0]", "scaled"),
    "another value": ("points * 2", "points * 2.1", "scaled"),
    "another type": ("points if flag", "points.double() if flag", "scaled"),
    "another branch": ("if flag else", "if not flag else", "scaled"),
    "its object differs": ("self.start += int", "self.start = int", "Counter.count"),
    "random numbers differ": ("torch.rand(())", "torch.rand(2)[0]", "Counter.count"),
}
SAME = {
    "a function": ("points * 2", "2 * points", "scaled"),
    "a method": ("int(mask.sum())", "int(mask.sum().item())", "Counter.count"),
}


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("code")
    Path(folder, "written_for_calls.py").write_text(BEFORE)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield importlib.import_module("written_for_calls")
        del sys.modules["written_for_calls"]


def found(module: Any, old: str, new: str, unit: str) -> dict[str, Any]:
    after = BEFORE.replace(old, new)
    assert not broken(BEFORE, after)
    (pair,) = pairs_of(module, BEFORE, after, unit)
    one = calls.Unit(pair, changed_lines(BEFORE, after), "BITWISE")
    return calls._search(one, 20, "seed")


@pytest.mark.parametrize(("old", "new", "unit"), FAULTS.values(), ids=FAULTS)
def test_a_fault_is_seen(module: Any, old: str, new: str, unit: str) -> None:
    assert found(module, old, new, unit)["failures"]


@pytest.mark.parametrize(("old", "new", "unit"), SAME.values(), ids=SAME)
def test_the_same_is_called_and_agrees(module: Any, old: str, new: str, unit: str) -> None:
    seen = found(module, old, new, unit)
    assert seen["reached"] >= calls._ENOUGH_REACHED
    assert not seen["failures"]


def test_what_is_broken_as_a_whole_is_told() -> None:
    assert "compile" in broken(BEFORE, BEFORE.replace("return self.start", "return self. start ="))
    assert "outside" in broken(BEFORE, BEFORE + "X = 1\n")
    assert not broken(BEFORE, f"import math\n{BEFORE}")


def test_units_are_functions_and_methods() -> None:
    tree = ast.parse(BEFORE)
    assert [name for name, _ in units(tree.body)] == ["scaled", "Counter.__init__", "Counter.count"]
    line = BEFORE.splitlines().index("    @torch.no_grad()") + 1
    assert unit_at(tree, line) == "Counter.count"
