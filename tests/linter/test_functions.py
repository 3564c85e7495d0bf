"""What holds a function is known by what it holds: attributes, names, defaults, dicts, tuples of results."""

from __future__ import annotations

import ast
import textwrap
from pathlib import Path

import pytest

import torchtrim
from torchtrim.linter.static_syncs import is_used, keeps, static_syncs

HEAD = """
import functools
import torch
from torch import nn
import torch.nn.functional as F

ACTIVATIONS = {"gelu": F.gelu, "silu": F.silu}

def counted(x: torch.Tensor):
    return x.sum()

def table(config) -> tuple[torch.Tensor, float]:
    size = getattr(config, "size", None) or config.width
    return torch.arange(size, dtype=torch.float), 1.0
"""
MANY = ("sin", "cos", "tan", "exp", "log", "sqrt", "abs", "sum")
CLASS = """
class M(nn.Module):
    def __init__(self, act=F.gelu, norm=nn.LayerNorm):
        self.held = {held}
        self.norm = norm(4)
        self.act = act

    def total(self, x: torch.Tensor):
        return x.sum()

    @staticmethod
    def rates(config) -> tuple[torch.Tensor, float]:
        return torch.arange(config.size), 1.0

    def forward(self, x, config):
        {line}
"""


def found(text: str) -> list[str]:
    whole = HEAD + textwrap.dedent(text)
    return [one.row for one in static_syncs(ast.parse(whole), "m.py", text=whole)]


@pytest.mark.parametrize(
    ("held", "line", "rows"),
    [
        ("torch.nonzero", "return self.held(x)", ["nonzero"]),
        ("F.gelu", "return self.held(x).item()", ["item"]),
        ("F.gelu if act else torch.sin", "return self.held(x).item()", ["item"]),
        ("functools.partial(F.softmax, dim=-1)", "return self.held(x).item()", ["item"]),
        ("ACTIVATIONS[act]", "return self.held(x).item()", ["item"]),
        ("lambda x: x.to(torch.float).sum(dim=0)", "return self.held(x).item()", ["item"]),
        ("counted", "return float(self.held(x))", ["item"]),
        ("self.total", "return float(self.held(x))", ["item"]),
        ("None", "return float(self.act(x))", ["item"]),
        ("None", "return float(self.norm(x))", ["item"]),
        ("self.rates", "a, b = self.held(config)\n        return a.to(x.device)", ["upload"]),
        ("self.rates", "a, b = self.held(config)\n        return float(b)", []),
        ("table", "return table(config)[0].to(x.device)", ["upload"]),
        ("table", "return float(table(config)[1])", []),
        ("torch.nonzero if act else F.gelu", "return self.held(x)", []),
        ("act", "return float(self.held.name)", []),
        ("len", "return float(self.held(x))", []),
    ],
)
def test_calls_of_what_an_attribute_holds(held: str, line: str, rows: list[str]) -> None:
    assert found(CLASS.format(held=held, line=line)) == rows


@pytest.mark.parametrize(
    ("body", "rows"),
    [
        ("act = F.gelu\nreturn act(x).item()", ["item"]),
        ("if x is None:\n    act = other\nelse:\n    act = F.gelu\nreturn act(x).item()", ["item"]),
        ("act = F.gelu\nact = 3\nreturn float(act)", []),
        ("return {'a': F.gelu}['a'](x).item()", ["item"]),
        ("return float(F)", []),
    ],
)
def test_calls_of_what_a_name_holds(body: str, rows: list[str]) -> None:
    assert found("def f(x, other):\n" + textwrap.indent(body, "    ")) == rows


@pytest.mark.parametrize(
    "one",
    [
        "np.max if flag else torch.max",
        "math.sqrt if flag else torch.sqrt",
        "max if flag else torch.max",
        "{'len': len, 'max': torch.max}[flag]",
        "numel if flag else torch.max",
    ],
)
@pytest.mark.parametrize("read", ["float(one(x))", "bool(one(x) > 1)", "1 if one(x) > 1 else 2"])
def test_what_may_be_no_function_of_torch_is_not_said_to_wait(one: str, read: str) -> None:
    head = "import math\nimport numpy as np\ndef numel(x) -> int:\n    return 3\n"
    assert found(f"{head}def f(x, flag):\n    one = {one}\n    return {read}\n") == []


@pytest.mark.parametrize("given", ["one", "one=torch.sum"])
def test_what_is_given_or_loaded_may_be_another_function(given: str) -> None:
    text = f"""
    def f(x, flag, load, {given}):
        two = load()
        if flag:
            two = torch.max
        if one(x) > 1 or two(x) > 1:
            return 1
    """
    assert found(text) == []


def test_of_many_functions_there_are_others() -> None:
    many = "{" + ", ".join(f"'{name}': torch.{name}" for name in MANY) + ", 'max': torch.max}"
    text = f"def f(x, flag):\n    one = {many}[flag]\n    return 1 if one(x) > 1 else 2\n"
    assert found(text) == []


def test_what_only_makes_parameters_runs_once() -> None:
    text = "def compute_default_rope_parameters(x: torch.Tensor):\n    return x.item()\n"
    assert found(text) == []
    assert found(text.replace("_parameters", "")) == ["item"]


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
    assert is_used("f", text, method=False)
    assert is_used("h", text, method=True)
    assert not is_used("g", text, method=True)
    assert not is_used("g", text, method=False)


@pytest.mark.parametrize("room", ["attention", "stream", "executor", "evidence", "certify"])
def test_the_same_is_found_where_only_what_is_used_is_followed(room: str) -> None:
    found = 0
    for path in sorted((PACKAGE / room).rglob("*.py")):
        text = path.read_text()
        tree = ast.parse(text)
        whole = static_syncs(tree, str(path))
        assert static_syncs(tree, str(path), text=text) == whole
        found += len(whole)
    assert found
