"""What a module's code writes beyond its tensors, and which look-alikes do not count."""

from __future__ import annotations

import itertools
import linecache
import random
import textwrap
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from torchtrim.capture.code.side_effects import SideEffects, changed
from torchtrim.executor.registry import technique
from torchtrim.records.plan import Technique

_NUMBERS = itertools.count()

WORLD = """
import collections, functools, os, random, sys
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

LOG = []
TABLE = {}
COUNT = 0
SEEN = set()
RECENT = collections.deque()
TOTAL = torch.zeros(3)
TURNS = iter(range(9))
INDEX = [0]
SPARE = torch.Generator()

class Meter:
    def __init__(self):
        self.sum, self.values = 0, []
    def note(self, x):
        self.values.append(x)
    def count(self):
        self.sum += 1
    def read(self):
        return self.sum

METER = Meter()

def helper(log, x):
    log.append(x)
    return x

def pure(log, x):
    return x + len(log)

def noted(function):
    @functools.wraps(function)
    def wrapped(*args):
        LOG.append(1)
        return function(*args)
    return wrapped

note = functools.partial(helper, LOG)
note_by_name = functools.partial(helper, log=LOG)
"""

NET = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("mean", torch.zeros(3))
        self.log, self.table, self.calls = [], {}, 0
        self.meter = Meter()
        self.cache = None
        self.rng = random.Random(0)
        self.numpy_rng = np.random.default_rng(0)
        self.draws = [torch.Generator(), 3]
        self.draw = random.Random(1).random
"""


def loaded(source: str) -> dict[str, Any]:
    """Run source that `inspect` can read, and return its names."""
    name = f"/nowhere/program_{next(_NUMBERS)}.py"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    names: dict[str, Any] = {"__name__": "program"}
    exec(compile(source, name, "exec"), names)
    return names


def net_of(body: str, before: str = "") -> tuple[nn.Module, dict[str, Any]]:
    """Return a module with this `forward`, or this whole method, and the names around it."""
    method = body if "def forward" in body else "def forward(self, x):\n" + _indented(body)
    names = loaded(WORLD + before + NET + "\n" + _indented(method))
    net: nn.Module = names["Net"]()
    return net, names


def _indented(text: str) -> str:
    return textwrap.indent(text, "    ")


WRITES = {
    "append": "self.log.append(1)\nreturn x",
    "extend": "self.log.extend([1])\nreturn x",
    "augmented": "self.log += [1]\nreturn x",
    "slice": "self.log[:] = []\nreturn x",
    "element": "self.table['x'] = 1\nreturn x",
    "delete": "del self.log[0]\nreturn x",
    "global list": "LOG.append(x)\nreturn x",
    "global dict": "TABLE['x'] = x\nreturn x",
    "global name": "global COUNT\nCOUNT += 1\nreturn x",
    "global set": "SEEN.add(1)\nreturn x",
    "deque": "RECENT.appendleft(1)\nreturn x",
    "alias": "log = self.log\nlog.append(1)\nreturn x",
    "either of two": "log = self.log if x.sum() > 0 else []\nlog.append(1)\nreturn x",
    "unpacked": "log, other = self.log, 1\nlog.append(1)\nreturn x",
    "helper": "return helper(self.log, x)",
    "partial": "return note(x)",
    "partial by name": "return note_by_name(x=x)",
    "helper's method": "self.meter.note(x)\nreturn x",
    "helper's count": "METER.count()\nreturn x",
    "attribute of an object": "METER.sum = 1\nreturn x",
    "setattr of an object": "setattr(METER, 'sum', 1)\nreturn x",
    "decorated": "@noted\ndef forward(self, x):\n    return x",
    "default": "def forward(self, x, log=[]):\n    log.append(1)\n    return x",
    "keyword default": "def forward(self, x, *, log=[]):\n    log.append(1)\n    return x",
    "keyword argument": "return helper(x=x, log=self.log)",
    "environment": "os.environ['A'] = '1'\nreturn x",
    "file": "open('a', 'w')\nreturn x",
    "mode by name": "open('a', mode='a')\nreturn x",
    "print": "print(x)\nreturn x",
    "print in a branch": "if x.sum() > 0:\n    print(x)\nreturn x",
    "stdout": "sys.stdout.write('x')\nreturn x",
    "iterator": "next(TURNS)\nreturn x",
    "global tensor": "TOTAL.add_(1)\nreturn x",
    "view of a global tensor": "TOTAL.view(-1).mul_(2)\nreturn x",
    "global tensor's element": "TOTAL[0] = 1\nreturn x",
    "augmented global tensor": "global TOTAL\nTOTAL += 1\nreturn x",
    "parameter": "self.weight.data.mul_(2)\nreturn x",
    "out": "torch.add(x, 1, out=TOTAL)\nreturn x",
    "save": "torch.save(x, 'a')\nreturn x",
    "lambda": "f = lambda y: LOG.append(y)\nf(x)\nreturn x",
    "comprehension": "[LOG.append(i) for i in range(3)]\nreturn x",
    "inner function": "def inner():\n    LOG.append(1)\ninner()\nreturn x",
    "loop target": "for INDEX[0] in range(2):\n    x = x + 1\nreturn x",
    "with": "with open('a', 'w') as file:\n    file.write('x')\nreturn x",
}


@pytest.mark.parametrize("body", WRITES.values(), ids=WRITES)
def test_a_write_is_found_with_its_line(body: str) -> None:
    net, _ = net_of(body)
    found = SideEffects([net]).writes
    assert found
    assert all(one.line > 0 and "/nowhere/program_" in one.path for one in found)


HARMLESS = {
    "local list": "log = []\nlog.append(x)\nlog += [x]\nreturn log[0]",
    "fresh dict": "table = dict(a=x)\ntable['b'] = x\nreturn table.pop('a')",
    "keywords": "def forward(self, x, **kwargs):\n    kwargs.pop('mask', None)\n    return x",
    "own buffer": "self.mean.add_(1)\nself.mean[0] = 2\nreturn x",
    "own buffer by data": "self.mean.data.mul_(0.5)\nreturn x",
    "attribute": "self.calls += 1\nself.cache = x\nreturn x",
    "setattr of itself": "setattr(self, 'cache', x)\nreturn x",
    "reading a file": "open('a')\nopen('a', 'rb')\nreturn x",
    "torch functions": "return F.relu(self.linear(x)) + torch.zeros(3)",
    "in place on a local": "y = x + 1\ny.add_(1)\ny[0] = 2\nreturn y",
    "the caller's list": "def forward(self, x, log):\n    log.append(x)\n    return x",
    "reading a list": "return pure(self.log, x)",
    "reading an object": "return x + self.meter.read()",
    "a print that raises": "if x.dim() > 9:\n    print(x)\n    raise ValueError\nreturn x",
    "a local name like a global one": "LOG = []\nLOG.append(x)\nreturn x",
    "next of a local": "turns = iter([x])\nreturn next(turns)",
    "out that is local": "y = x.clone()\nreturn torch.add(x, 1, out=y)",
}


@pytest.mark.parametrize("body", HARMLESS.values(), ids=HARMLESS)
def test_a_look_alike_is_no_write(body: str) -> None:
    net, _ = net_of(body)
    assert SideEffects([net]).writes == []


def test_hooks_and_a_forward_of_its_own_are_read() -> None:
    hooked, _ = net_of("return x")
    hooked.register_forward_hook(loaded("LOG = []\ndef hook(*_):\n    LOG.append(1)\n")["hook"])
    own, _ = net_of("return x")
    own.forward = loaded("LOG = []\ndef forward(x):\n    LOG.append(1)\n")["forward"]
    assert SideEffects([hooked]).writes
    assert SideEffects([own]).writes


@pytest.mark.parametrize(
    ("hook", "writes"),
    [
        ("lambda m, args, out: None", False),
        ("lambda m, args, out: out * 0.5", False),
        ("lambda m, args, out: LOG.append(1)", True),
        ("lambda m, args, out: setattr(m, 'last', out)", True),
        ("lambda m, args, out: args[0].mul_(2) and None", True),
        ("lambda *given: given[0].seen.append(1)", True),
        ("LOG.append", True),
        ("print", True),
    ],
)
def test_hooks_on_all_modules_are_read(hook: str, writes: bool) -> None:
    net, _ = net_of("return x")
    found = loaded(f"LOG = []\nHOOK = {hook}\n")["HOOK"]
    removable = nn.modules.module.register_module_forward_hook(found)
    try:
        assert bool(SideEffects([net]).writes) == writes
    finally:
        removable.remove()
    assert SideEffects([net]).writes == []


def test_a_closure_is_read() -> None:
    maker = """
def make():
    log, count = [], 0
    def listing(x):
        log.append(x)
    def counting(x):
        nonlocal count
        count += 1
    return listing, counting
listing, counting = make()
"""
    for name in ("listing", "counting"):
        net, _ = net_of(f"{name}(x)\nreturn x", maker)
        assert SideEffects([net]).writes


def test_code_without_source_counts_by_its_names() -> None:
    names = {"nn": nn, "LOG": []}
    exec("class Net(nn.Module):\n    def forward(self, x):\n        LOG.append(x)", names)
    found = SideEffects([names["Net"]()])
    assert found.is_unread
    assert found.writes


GENERATORS = {
    "torch": ("x + torch.rand(3, generator=SPARE)", torch.Generator),
    "random": ("x + self.rng.random()", random.Random),
    "numpy": ("x + self.numpy_rng.random()", np.random.Generator),
    "module": ("x + random.random()", random.Random),
    "numpy's module": ("x + np.random.rand()", np.random.RandomState),
    "in a list": ("x + torch.rand(3, generator=self.draws[0])", torch.Generator),
    "bound": ("x + self.draw()", random.Random),
}


@pytest.mark.parametrize(("expression", "kind"), GENERATORS.values(), ids=GENERATORS)
def test_a_generator_is_found(expression: str, kind: type) -> None:
    net, _ = net_of(f"return {expression}")
    assert any(isinstance(one, kind) for one in SideEffects([net]).generators)


class Noisy(nn.Module):
    """Draws with what it is made with, through another function."""

    def __init__(self, draw: Callable[[], torch.Tensor]) -> None:
        super().__init__()
        self.draw, self.inner = draw, nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.inner(x) * self.draw()).relu()


@pytest.mark.parametrize("kept", ["plain", "list", "function"])
def test_a_generator_that_a_function_closes_over_is_found_and_rewound(kept: str) -> None:
    """A closure's own names were not looked up: another run of the block drew other numbers."""
    generator = torch.Generator().manual_seed(3)
    several = [generator]

    def drawn() -> torch.Tensor:
        return torch.rand(4, generator=generator)

    draws: dict[str, Callable[[], torch.Tensor]] = {
        "plain": lambda: torch.rand(4, generator=generator),
        "list": lambda: torch.rand(4, generator=several[0]),
        "function": lambda: drawn() + 1,
    }
    net, x = Noisy(draws[kept]), torch.ones(2, 4)
    assert SideEffects([net]).generators == [generator]
    gradients = []
    for planned in (False, True):
        generator.manual_seed(3)
        net.zero_grad()
        place = Technique(name="recompute", where=("Net",), equivalence="BITWISE")
        handle = technique("recompute").apply({"Net": net}, place) if planned else None
        net(x).square().sum().backward()
        gradients.append(net.inner.weight.grad)
        if handle is not None:
            handle.revert()
    assert torch.equal(*gradients)


def test_the_shared_generator_of_random_is_found_only_where_it_is_used() -> None:
    shared: Any = random.random.__self__  # type: ignore[attr-defined]
    drawing, _ = net_of("return x + random.random()")
    quiet, _ = net_of("return x")
    assert any(one is shared for one in SideEffects([drawing]).generators)
    assert not any(one is shared for one in SideEffects([quiet]).generators)


def test_a_dict_with_a_get_of_its_own_is_read_as_an_object() -> None:
    registry = """
class Registry(dict):
    def get(self, key):
        return len(self)

REGISTRY = Registry()
"""
    net, names = net_of("return x if REGISTRY.get(self) else -x", registry)
    references = SideEffects([net]).references
    assert not changed(references)
    names["Registry"].get = lambda self, key: 1
    assert changed(references)


def test_a_replaced_function_is_a_change() -> None:
    net, names = net_of("return pure(self.log, F.relu(x))")
    references = SideEffects([net]).references
    assert not changed(references)
    names["pure"] = names["helper"]
    assert changed(references)


def test_a_replaced_forward_or_function_of_torch_is_a_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    net, _ = net_of("return F.relu(x)")
    references = SideEffects([net]).references
    with monkeypatch.context() as patch:
        patch.setattr(F, "relu", F.gelu)
        assert changed(references)
    assert not changed(references)
    monkeypatch.setattr(type(net), "forward", lambda self, x: x)
    assert changed(references)


def test_a_replaced_function_that_a_layer_of_torch_calls_is_a_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    references = SideEffects([nn.ReLU()]).references
    monkeypatch.setattr(F, "relu", F.gelu)
    assert changed(references)


class Registry(dict[str, Any]):
    """A dict as transformers has: its `get` takes no default, and its items are made on demand."""

    def get(self, key: str) -> Any:  # type: ignore[override]
        return super().get(key) or {}


def test_a_dict_with_a_get_of_its_own_is_read_as_a_dict() -> None:
    net, names = net_of("return x if TABLE.get('none') else F.relu(x)")
    names["TABLE"] = Registry()
    references = SideEffects([net]).references
    assert not changed(references)
    names["TABLE"] = Registry()
    assert changed(references)


def test_each_of_several_lambdas_of_a_line_is_read() -> None:
    log: list[int] = []
    functions = (lambda x: x, lambda x: log.append(x), lambda x: (lambda y: log.extend(y))(x))  # fmt: skip
    assert [bool(SideEffects((), [one]).writes) for one in functions] == [False, True, True]
