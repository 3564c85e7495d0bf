"""Types across the files of a project, and files that no device runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchtrim.linter.project import is_cpu_test
from torchtrim.linter.text import lint_text

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


def test_unit_tests_that_name_no_device_are_of_the_host(tmp_path: Path) -> None:
    assert lines(tmp_path, UNIT, "test_model.py") == []
    assert lines(tmp_path, UNIT, "model.py") == [4]
    assert lines(tmp_path, UNIT.replace("model(1)", "model(1).to(torch_device)"), "test_b.py") == [
        4
    ]
    assert is_cpu_test("a/model_test.py", UNIT)
    assert not is_cpu_test("a/testing.py", UNIT)


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
