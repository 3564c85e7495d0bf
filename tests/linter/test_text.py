"""From a file's text to findings and fixed text."""

from __future__ import annotations

import sys
import textwrap

import pytest

from torchtrim.errors import UnreadableInput
from torchtrim.linter.text import fixed_text, lint_text

CODE = textwrap.dedent(
    """
    import torch


    def step(x: torch.Tensor, mask: torch.BoolTensor, total: float) -> torch.Tensor:
        total += x.sum().item()
        first, second = x[mask], x[~mask]
        x[mask.nonzero(as_tuple=True)] = 0
        # a comment that stays
        return x + torch.tensor(2.0, device=x.device)
    """
)


def test_each_line_that_waits_is_one_finding_of_a_code() -> None:
    found = lint_text("model.py", CODE)
    assert [(one.code, one.line) for one in found] == [
        ("TT101", 6),
        ("TT102", 7),
        ("TT102", 8),
        ("TT103", 10),
    ]
    assert found[1].message.startswith("host-device sync in `x[mask]`, `x[~mask]`:")
    assert all(one.path == "model.py" and one.count_per_step == 0 for one in found)
    assert all(one.fix is not None and one.fix.reason for one in found)


def test_a_fix_comes_with_its_diff_and_says_what_no_run_has_shown() -> None:
    (found,) = (one for one in lint_text("model.py", CODE) if one.line == 8)
    assert found.fix is not None
    assert found.fix.kind == "code"
    assert found.fix.reason.startswith("unsafe, masked_fill: no run has shown that")
    assert found.fix.diff is not None
    assert "+    x[mask != 0] = 0" in found.fix.diff


def test_a_comment_leaves_a_line_out() -> None:
    code = CODE.replace("item()", "item()  # torchtrim: ignore[TT101]")
    assert 6 not in [one.line for one in lint_text("model.py", code)]
    code = CODE.replace("item()", "item()  # torchtrim: ignore[TT102]")
    assert 6 in [one.line for one in lint_text("model.py", code)]


def test_codes_are_selected() -> None:
    found = lint_text("model.py", CODE, lambda code: code == "TT103")
    assert [one.code for one in found] == ["TT103"]


def test_without_torch_nothing_is_looked_at() -> None:
    assert lint_text("model.py", "def f(x): return x.item()\n") == []


def test_what_is_no_python_is_told() -> None:
    with pytest.raises(UnreadableInput, match=r"model\.py, line 2 is no Python"):
        lint_text("model.py", "import torch\ndef f(:\n")


def test_what_is_nested_too_deeply_is_told() -> None:
    deep = "import torch\ny = x" + " + x" * 20_000 + "\n"
    with pytest.raises(UnreadableInput, match="model"):
        lint_text("model.py", deep)


def test_fixes_without_evidence_are_applied_only_where_asked() -> None:
    text, applied = fixed_text("model.py", CODE)
    assert "x[mask.nonzero(as_tuple=True)] = 0" in text
    loose, more = fixed_text("model.py", CODE, unsafe=True)
    assert more > applied
    assert "nonzero" not in loose
    assert "# a comment that stays" in loose


def test_fixing_ends_and_a_second_time_changes_nothing() -> None:
    once, _ = fixed_text("model.py", CODE, unsafe=True)
    assert fixed_text("model.py", once, unsafe=True) == (once, 0)


def test_what_is_ignored_is_not_fixed() -> None:
    code = CODE.replace("= 0\n", "= 0  # torchtrim: ignore[TT102]\n")
    assert "nonzero" in fixed_text("model.py", code, unsafe=True)[0]


def test_a_base_class_of_the_file_counts_as_its_own_code() -> None:
    code = """
import torch
from torch import nn


def unrelated(x: torch.Tensor):
    return x + 1


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)


class Model(Base):
    def forward(self, x):
        return self.layer(x).tolist()
"""
    assert [one.line for one in lint_text("model.py", code)] == [18]


def long_function(reads: int) -> str:
    body = "    x = x + x.item()\n" * reads
    return f"import torch\ndef f(x: torch.Tensor):\n{body}    return x\n"


def test_fixes_are_looked_for_at_so_many_places_of_a_file() -> None:
    found = lint_text("long.py", long_function(260))
    assert len(found) == 260
    later = [one.line for one in found if one.fix and "No fix was looked for" in one.fix.reason]
    assert later == list(range(253, 263))


def test_the_work_grows_as_the_file_does() -> None:
    calls = []
    for reads in (300, 600):
        count = 0

        def called(frame: object, event: str, argument: object) -> None:
            nonlocal count
            count += event == "call"

        text = long_function(reads)
        sys.setprofile(called)
        try:
            lint_text("long.py", text)
        finally:
            sys.setprofile(None)
        calls.append(count)
    assert calls[1] < 2.2 * calls[0]
