"""What modules take and return in generated scripts."""

from __future__ import annotations

from typing import NamedTuple


class Takes(NamedTuple):
    """The parameters after `self`, lines that find `x` among them, and a call of `<module>` with `<x>`."""

    parameters: str
    unpacked: str
    call: str
    before: str = ""


class Returns(NamedTuple):
    """Lines that return `x`, and the expression of it from `<out>` and the `<module>` that gave it."""

    returned: str
    taken: str
    before: str = ""


_GIVEN = """
@dataclasses.dataclass
class Given:
    x: torch.Tensor
    scale: float = 1.0
"""
_PAIR = """
class Pair(NamedTuple):
    x: torch.Tensor
    mask: torch.Tensor | None = None
"""
_OUTPUT = """
@dataclasses.dataclass
class Output:
    hidden: torch.Tensor
    extra: list | None = None
"""
_RESULT = """
class Result(NamedTuple):
    hidden: torch.Tensor
    count: int
"""
_MODEL_OUTPUT = """
class ModelOutput(collections.OrderedDict):
    def __getattr__(self, name):
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None

    def __getitem__(self, key):
        return list(self.values())[key] if isinstance(key, int) else super().__getitem__(key)
"""

TAKES: dict[str, Takes] = {
    "a tensor": Takes("x", "", "<module>(<x>)"),
    "keywords only": Takes("*, x, scale=1.0", "", "<module>(x=<x>)"),
    "stars": Takes("*xs", "(x,) = xs", "<module>(*[<x>])"),
    "kwargs": Takes("**given", "x = given['x']", "<module>(**{'x': <x>, 'labels': None})"),
    "a dict": Takes("batch", "x = batch['x']", "<module>({'x': <x>, 'n': 3})"),
    "lists of lists": Takes("xs", "x = xs[0][0]", "<module>([[<x>], []])"),
    "a dataclass": Takes("given", "x = given.x", "<module>(Given(x=<x>))", _GIVEN),
    "a named tuple": Takes("pair", "x = pair.x", "<module>(Pair(<x>))", _PAIR),
    "a mutable default": Takes("x, cache=[]", "cache.append(x.shape)", "<module>(<x>)"),
    "a generator": Takes("xs", "x = next(xs)", "<module>(one for one in [<x>])"),
    "a function": Takes("make", "x = make()", "<module>(lambda: <x>)"),
    "options": Takes("x, mask=None, scale=2.0", "x = x * scale", "<module>(<x>, None, scale=1.0)"),
    "an object": Takes("batch", "x = batch.x", "<module>(types.SimpleNamespace(x=<x>, y=None))"),
    "the same twice": Takes("x, y", "x = (x + y) / 2", "<module>(<x>, <x>)"),
}
RETURNS: dict[str, Returns] = {
    "a tensor": Returns("return x", "<out>"),
    "a tuple": Returns("return x, None", "<out>[0]"),
    "a dict": Returns("return {'hidden': x, 'n': 1, 'names': ['a']}", "<out>['hidden']"),
    "a dataclass": Returns("return Output(x)", "<out>.hidden", _OUTPUT),
    "a named tuple": Returns("return Result(x, 1)", "<out>.hidden", _RESULT),
    "nothing": Returns("self.result = x", "(<out>, <module>.result)[1]"),
    "lists of lists": Returns("return [[x], []]", "<out>[0][0]"),
    "a generator": Returns("return (one for one in [x])", "next(<out>)"),
    "an object": Returns("return types.SimpleNamespace(hidden=x)", "<out>.hidden"),
    "a model's output": Returns(
        "return ModelOutput(loss=None, hidden=x)", "<out>.hidden", _MODEL_OUTPUT
    ),
    "the same twice": Returns("return x, x", "(sum(<out>) / 2)"),
    "a function": Returns("return lambda: x", "<out>()"),
    "several": Returns("return x, x.detach().mean(), [x * 2]", "<out>[0]"),
}
