"""Finds, from the source alone, masks that have all the dimensions of the tensor they select from.

A mask's shape is the start of the tensor's, so one computed elementwise from the tensor has its whole shape.
"""

from __future__ import annotations

import ast

from torchtrim.source.names import assigned_to, parameters, stores
from torchtrim.source.nodes import called, compares_values, name_set
from torchtrim.source.operations import operands_of
from torchtrim.source.source import SourceFile

_ELEMENTWISE = name_set("""
    abs bool byte ceil clamp clip contiguous cos cpu cuda detach double exp expm1 float floor half
    int isfinite isinf isnan log log10 log1p log2 logical_not long neg reciprocal relu rsqrt
    sigmoid sign sin sqrt square tan tanh trunc add sub mul div eq ne lt le gt ge logical_and
    logical_or logical_xor bitwise_and bitwise_or bitwise_xor bitwise_not isclose maximum minimum
    masked_fill pow remainder fmod
""")
_LIKE_THE_FIRST = name_set("""
    clone to type type_as cumsum cumprod softmax nan_to_num round zeros_like ones_like empty_like
    full_like rand_like randn_like randint_like
""")
_ONLY_OF_TORCH = {"where": 3, "max": 2, "min": 2}
"""The operand counts that make these functions elementwise."""

_TRUTHS = name_set("""
    bool isnan isfinite isinf isclose eq ne lt le gt ge logical_not logical_and logical_or logical_xor
""")
_Bases = tuple[frozenset[str], bool]
"""The names that a value is computed from; True if no other operand has more dimensions."""

_NOTHING: _Bases = frozenset(), False
_NUMBER: _Bases = frozenset(), True


def covers(mask: ast.expr, tensor: ast.expr, source: SourceFile) -> bool:
    """Return True for a boolean mask with at least as many dimensions as the tensor."""
    at = _ShapeOrigins(source, mask)
    if not at.is_of_truths(mask):
        return False
    known = at.bases(mask, least=True)[0]
    own, whole = at.bases(tensor)
    return ast.unparse(tensor) in at.written(mask) | known or (whole and bool(own) and own <= known)


class _ShapeOrigins:
    """Traces elementwise expressions at one place back to the names they are computed from."""

    def __init__(self, source: SourceFile, at: ast.AST) -> None:
        self._source = source
        self._function = source.function(at)
        self._line = source.statement(at).lineno
        self._open: set[str] = set()

    def written(self, node: ast.expr) -> set[str]:
        return {ast.unparse(node)}.union(*map(self.written, self._operands(node) or ()))

    def is_of_truths(self, node: ast.expr) -> bool:
        """Return True if the elements are booleans."""
        operands = self._operands(node)
        if isinstance(node, ast.Name):
            return any(map(self.is_of_truths, (self._values(node.id) or ())[:1]))
        if isinstance(node, ast.BinOp | ast.UnaryOp):
            logical = isinstance(node.op, ast.Invert | ast.BitAnd | ast.BitOr | ast.BitXor)
            return logical and all(map(self.is_of_truths, operands or ()))
        if isinstance(node, ast.Call):
            return operands is not None and called(node.func) in _TRUTHS
        return isinstance(node, ast.Compare) and operands is not None

    def bases(self, node: ast.expr, *, least: bool = False) -> _Bases:
        """Return the names a value is computed from. `least` includes intermediate names."""
        if isinstance(node, ast.Constant):
            return _NUMBER
        if isinstance(node, ast.Name):
            return self._of_name(node.id, least=least)
        if (operands := self._operands(node)) is None:
            return _NOTHING
        found = [self.bases(one, least=least) for one in operands]
        return frozenset().union(*(names for names, _ in found)), all(whole for _, whole in found)

    def _of_name(self, name: str, *, least: bool) -> _Bases:
        """Return the name itself as a base, unless its single value is computed from others."""
        values = self._values(name)
        if values is None or name in self._open:
            return _NOTHING
        itself = frozenset((name,))
        if not values:
            return itself, True
        self._open.add(name)
        names, whole = self.bases(values[0], least=least)
        self._open.discard(name)
        if least:
            return names | itself, True
        return (names, True) if whole else (itself, True)

    def _values(self, name: str) -> list[ast.expr] | None:
        """Return the value bound to the name before this place, if any; None if its rank may change."""
        given: list[ast.expr] = []
        bound = 0
        for node in stores(self._function, name):
            outer = self._source.parents[node]
            value = assigned_to(self._source, node)
            if isinstance(outer, ast.AugAssign) or (value and self._keeps(value, name)):
                continue
            bound += 1
            if value is not None and isinstance(outer, ast.Assign | ast.AnnAssign):
                given.append(value)
            if node.lineno >= self._line:
                return None
        bound += name in parameters(self._function)
        return None if bound > 1 else given

    def _keeps(self, value: ast.expr, name: str) -> bool:
        """Return True if the value has the rank of the name it is assigned to."""
        operands = self._operands(value)
        while operands is not None and len(operands) == 1:
            if isinstance(inner := operands[0], ast.Name):
                return inner.id == name
            operands = self._operands(inner)
        return False

    def _operands(self, node: ast.expr) -> list[ast.expr] | None:
        if isinstance(node, ast.BinOp) and not isinstance(node.op, ast.MatMult):
            return [node.left, node.right]
        if isinstance(node, ast.UnaryOp) and not isinstance(node.op, ast.Not):
            return [node.operand]
        if isinstance(node, ast.Compare) and compares_values(node):
            return [node.left, *node.comparators]
        return self._of_call(node) if isinstance(node, ast.Call) else None

    def _of_call(self, node: ast.Call) -> list[ast.expr] | None:
        dotted = self._source.dotted(node.func)
        if any(isinstance(one, ast.Starred) for one in node.args):
            return None
        name, given = operands_of(node, self._source)
        if not given or any(word.arg in ("out", None) for word in node.keywords):
            return None
        if name in _LIKE_THE_FIRST:
            return given[:1]
        if dotted is not None and name in _ONLY_OF_TORCH:
            plain = len(given) == _ONLY_OF_TORCH[name] and not node.keywords
            return given if plain and not isinstance(given[1], ast.Constant) else None
        given += [word.value for word in node.keywords if word.arg not in ("dtype", "device")]
        return given if name in _ELEMENTWISE else None
