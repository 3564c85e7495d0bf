"""Which expressions can be written twice, elsewhere or not at all: those that only compute a value."""

from __future__ import annotations

import ast

from torchtrim.source.source import Source
from torchtrim.source.tensor_methods import PURE

_BUILTINS = """
    abs all any bool dict enumerate float int isinstance len list max min range reversed round set
    sorted str sum tuple zip
"""
_DRAWING = """
    rand randn randint randperm rand_like randn_like randint_like bernoulli multinomial normal poisson
    dropout rrelu gumbel_softmax
"""
_PURE_BUILTINS = frozenset(_BUILTINS.split())
_RANDOM = frozenset(_DRAWING.split())
_SIMPLE = (ast.Name, ast.Attribute, ast.Constant, ast.UnaryOp, ast.unaryop, ast.expr_context)


def is_simple(node: ast.AST) -> bool:
    """Whether it is so cheap that it may be written twice: a name, an attribute, a number."""
    return all(isinstance(part, _SIMPLE) for part in ast.walk(node))


def is_pure(node: ast.AST, source: Source) -> bool:
    """Whether it only computes a value, of names, operators, and functions of torch that are known for it.

    A call of a user's function is not. Neither is what draws random numbers or changes
    something in place.
    """
    return all(_pure_itself(part, source) for part in ast.walk(node))


def _pure_itself(node: ast.AST, source: Source) -> bool:
    if isinstance(node, ast.Await | ast.Yield | ast.YieldFrom | ast.NamedExpr | ast.Lambda):
        return False
    return not isinstance(node, ast.Call) or _pure_call(node, source)


def _pure_call(node: ast.Call, source: Source) -> bool:
    name = source.dotted(node.func)
    if name is not None:
        last = name.rpartition(".")[2]
        return (
            name.startswith(("torch.", "math."))
            and not last.endswith("_")
            and last not in _RANDOM
            and not last[:1].isupper()
            and not name.startswith(("torch.cuda.", "torch.distributed.", "torch.random."))
        )
    if isinstance(node.func, ast.Name):
        return node.func.id in _PURE_BUILTINS
    if isinstance(node.func, ast.Attribute):
        itself = isinstance(node.func.value, ast.Name) and node.func.value.id in ("self", "cls")
        return not itself and node.func.attr in PURE
    return False
