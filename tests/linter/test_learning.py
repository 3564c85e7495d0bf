"""Functions that tell others nothing are not followed twice; what they would find is found all the same."""

from __future__ import annotations

import ast
import textwrap
from pathlib import Path

import pytest

import torchtrim
from torchtrim.linter.learning import is_asked_for, keeps
from torchtrim.linter.static_syncs import static_syncs

PACKAGE = Path(torchtrim.__file__).parent


def function(body: str) -> ast.FunctionDef:
    text = "def f(self, x):\n" + textwrap.indent(textwrap.dedent(body), "    ")
    (found,) = ast.parse(text).body
    assert isinstance(found, ast.FunctionDef)
    return found


@pytest.mark.parametrize(
    "body",
    [
        "self.x = x",
        "self.n: int = 0",
        "self.n += 1",
        "a, (b, *self.rest) = x",
        "for self.x in x: pass",
        "with x as self.x: pass",
        "if x:\n    try:\n        pass\n    except ValueError:\n        self.x = 1",
        "match x:\n    case 1:\n        self.x = 1",
        "self.register_buffer('x', x)",
        "import torch",
        "def g():\n    from torch import nn",
        "class C: pass",
    ],
)
def test_what_a_function_keeps(body: str) -> None:
    assert keeps(function(body))


@pytest.mark.parametrize("body", ["y = self.x", "other.x = 1", "self.x[0] = 1", "return self.f(x)"])
def test_what_a_function_does_not_keep(body: str) -> None:
    assert not keeps(function(body))


def test_what_a_file_asks_for() -> None:
    text = "def f(): ...\nclass C:\n    def g(self): self.h()\n    def h(self): f()\n"
    assert is_asked_for("f", text, method=False)
    assert is_asked_for("h", text, method=True)
    assert not is_asked_for("g", text, method=True)
    assert not is_asked_for("g", text, method=False)


@pytest.mark.parametrize("room", ["attention", "stream", "executor", "runner", "certify"])
def test_the_same_is_found_where_only_what_is_asked_for_is_followed(room: str) -> None:
    found = 0
    for path in sorted((PACKAGE / room).rglob("*.py")):
        text = path.read_text()
        tree = ast.parse(text)
        whole = static_syncs(tree, str(path))
        assert static_syncs(tree, str(path), text=text) == whole
        found += len(whole)
    assert found
