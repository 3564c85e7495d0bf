"""From a file's text to findings and fixed text."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import pytest

from torchtrim.errors import UnreadableInput
from torchtrim.linter.text import fixed_text, is_test, lint_text

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
    with pytest.raises(UnreadableInput, match=r"model\.py, line 2 is not valid Python"):
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
    later = [one.line for one in found if one.fix and "No fix was searched for" in one.fix.reason]
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


LOSSES = """import torch
def masked(x, mask):
    total = torch.where(mask, x, 0).sum()
    return total
def count(x):
    return len(x)
def maybe(x):
    if len(x):
        return torch.relu(x)
    return None
@unknown
def decorated(x):
    return torch.relu(x)
def steps(x):
    yield torch.relu(x)
def every(x) -> torch.BoolTensor:
    return x.sum() == x.numel()
class Output:
    pass
"""


def lines(folder: Path, text: str, name: str = "train.py") -> list[int]:
    path = folder / name
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text(text)
    return [found.line for found in lint_text(str(path), text)]


def use(function: str, module: str = "losses") -> str:
    head = f"import torch\nfrom {module} import {function}\n"
    return f"{head}def f(x, m):\n    return float({function}(x, m))\n"


@pytest.mark.parametrize(
    ("function", "waits"),
    [
        ("masked", True),
        ("count", False),
        ("maybe", True),
        ("decorated", False),
        ("steps", False),
        ("every", True),
        ("Output", False),
    ],
)
def test_what_a_function_of_another_file_returns(
    tmp_path: Path, function: str, waits: bool
) -> None:
    (tmp_path / "losses.py").write_text(LOSSES)
    assert lines(tmp_path, use(function)) == ([4] if waits else [])


def test_packages_relative_imports_and_names_that_are_passed_on(tmp_path: Path) -> None:
    package = tmp_path / "pkg"
    (package / "sub").mkdir(parents=True)
    for folder in (package, package / "sub"):
        (folder / "__init__.py").write_text("")
    (package / "losses.py").write_text(LOSSES)
    (package / "sub" / "__init__.py").write_text("import torch\nfrom ..losses import masked\n")
    for module in ("..losses", "pkg.losses", "pkg.sub", "."):
        assert lines(tmp_path, use("masked", module), "pkg/sub/model.py") == [4], module
    for module in ("..nothing", "elsewhere.losses", "....losses"):
        assert lines(tmp_path, use("masked", module), "pkg/sub/other.py") == [], module


@pytest.mark.parametrize("text", ["def (", "\0", "x = " + "(" * 300])
def test_a_file_that_cannot_be_read_says_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "losses.py").write_text(text)
    assert lines(tmp_path, use("masked")) == []


def test_files_that_import_each_other(tmp_path: Path) -> None:
    (tmp_path / "losses.py").write_text("import torch\nfrom train import masked\n")
    assert lines(tmp_path, use("masked")) == []


UNIT = "import torch\ndef test_it():\n    x = torch.relu(model(1))\n    assert x.item() > 0\n"


def test_unit_tests_are_left_out_and_scripts_of_their_names_only_without_a_device(
    tmp_path: Path,
) -> None:
    on_device = UNIT.replace("model(1)", "model(1).to(torch_device)")
    assert lines(tmp_path, UNIT, "model.py") == [4]
    for text in (UNIT, on_device, UNIT.replace("test_it", "score")):
        assert lines(tmp_path, text, "test_model.py") == []
    assert lines(tmp_path, on_device.replace("test_it", "score"), "test_model.py") == [4]
    assert is_test("a/model_test.py", UNIT)
    assert not is_test("a/testing.py", UNIT)


def test_the_truth_of_what_is_computed_and_annotated(tmp_path: Path) -> None:
    (tmp_path / "losses.py").write_text(LOSSES + "def said(x) -> torch.Tensor:\n    return x\n")
    for function, found in (("every", [4]), ("said", []), ("Output", [])):
        text = (
            use(function)
            .replace("return float(", "return 1 if (")
            .replace("(x, m))", "(x)) else 0")
        )
        assert lines(tmp_path, text) == found, function


@pytest.mark.parametrize("head", ["import losses as l", "from . import losses as l"])
def test_a_function_that_is_called_through_its_module(tmp_path: Path, head: str) -> None:
    (tmp_path / "losses.py").write_text(LOSSES)
    text = f"import torch\n{head}\ndef f(x, m):\n    return float(l.masked(x, m))\n"
    assert lines(tmp_path, text) == [4]
    assert lines(tmp_path, text.replace("masked", "count")) == []
