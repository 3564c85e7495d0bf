from pathlib import Path

import pytest

from torchtrim.analysis.user_source import SourceLines

CODE = """import torch

class Net:
    def forward(self, x):
        def inner():
            return x.item()
        return  inner()

async def wait(): return 1
top = 1
"""


@pytest.fixture
def source(tmp_path: Path) -> SourceLines:
    (tmp_path / "net.py").write_text(CODE)
    (tmp_path / "broken.py").write_text("def f(:\n  x\n")
    (tmp_path / "notes.txt").write_text("secret")
    return SourceLines(str(tmp_path))


@pytest.mark.parametrize(
    ("line", "text", "function"),
    [
        (1, "import torch", ""),
        (3, "class Net:", "Net"),
        (6, "return x.item()", "Net.forward.inner"),
        (7, "return  inner()", "Net.forward"),
        (9, "async def wait(): return 1", "wait"),
        (10, "top = 1", ""),
        (99, "", ""),
        (0, "", ""),
        (-1, "", ""),
    ],
)
def test_a_line_and_its_function(source: SourceLines, line: int, text: str, function: str) -> None:
    assert source.line("net.py", line) == text
    assert source.function("net.py", line) == function


def test_absolute_paths_are_read_too(source: SourceLines, tmp_path: Path) -> None:
    assert source.line(str(tmp_path / "net.py"), 1) == "import torch"


def test_what_does_not_parse_has_lines_and_no_functions(source: SourceLines) -> None:
    assert source.line("broken.py", 2) == "x"
    assert source.function("broken.py", 2) == ""


@pytest.mark.parametrize("path", ["none.py", "notes.txt", "", ".", "a\0b.py", "x" * 5000 + ".py"])
def test_what_cannot_be_read_is_empty(source: SourceLines, path: str) -> None:
    assert source.line(path, 1) == ""
    assert source.function(path, 1) == ""


def test_a_function_that_spans_many_lines_is_found_by_its_last(tmp_path: Path) -> None:
    (tmp_path / "long.py").write_text("def f():\n    return (\n        1\n    )\n")
    assert SourceLines(str(tmp_path)).function("long.py", 4) == "f"
