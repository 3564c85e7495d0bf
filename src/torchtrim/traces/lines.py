"""The exact line of a call, from the source: a trace tells only where the function begins."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from torchtrim.errors import UnreadableInput
from torchtrim.records.files import read_bounded

_MOST_BYTES = 2**22
_MOST_PARTS = 64  # Arbitrary; paths in a file that is not trusted are no deeper.
_BUILT_IN = re.compile(r"<built-in (?:method|function) (\w+)")
_CALLED = re.compile(r"\(\d+\): (\w+)$")
_COPIES = frozenset(
    (
        "to",
        "cuda",
        "cpu",
        "copy_",
        "numpy",
        "float",
        "half",
        "double",
        "long",
        "int",
        "bool",
        "type",
    )
) | {"bfloat16", "tensor", "as_tensor", "new_tensor", "pin_memory", "asarray"}
_READS = frozenset(
    (
        "item",
        "tolist",
        "float",
        "int",
        "bool",
        "print",
        "range",
        "format",
        "equal",
        "allclose",
        "max",
    )
) | {"min", "any", "all", "str", "repr", "round", "len", "isinstance"}
_SHAPES = frozenset(
    ("nonzero", "argwhere", "where", "masked_select", "unique", "unique_consecutive")
)
_BY_OPERATOR = {
    "aten::item": _READS,
    "aten::is_nonzero": frozenset(("bool",)),
    "aten::_local_scalar_dense": _READS,
    "aten::nonzero": _SHAPES,
    "aten::_unique2": frozenset(("unique",)),
    "aten::copy_": _COPIES,
    "aten::_to_copy": _COPIES,
    "aten::to": _COPIES,
}
Scope = ast.AST
_SCOPES: dict[str, type[ast.AST]] = {
    "<lambda>": ast.Lambda,
    "<listcomp>": ast.ListComp,
    "<setcomp>": ast.SetComp,
    "<dictcomp>": ast.DictComp,
    "<genexpr>": ast.GeneratorExp,
}


@dataclass(kw_only=True)
class Sources:
    """The source files below a folder, parsed when they are asked for."""

    folder: Path
    parsed: dict[str, ast.Module | None] = field(default_factory=dict)
    found: dict[tuple[str, int, str, tuple[str, ...]], list[int]] = field(default_factory=dict)

    def lines(self, path: str, definition: int, function: str, hints: tuple[str, ...]) -> list[int]:
        """The lines in the function that begins at that line from which the wait may come.

        `hints` tell what the wait was seen to be called by, best first: the names of a built-in, of a
        function called from there, of operators. Empty where the source is not there or has no such call.
        """
        asked = (path, definition, function, hints)
        if asked not in self.found:
            self.found[asked] = self._lines(*asked)
        return self.found[asked]

    def has(self, path: str) -> bool:
        """Whether the file is below the folder."""
        return self._module(path) is not None

    def _lines(
        self, path: str, definition: int, function: str, hints: tuple[str, ...]
    ) -> list[int]:
        module = self._module(path)
        node = _function(module, definition, function) if module is not None else None
        if node is None:
            return []
        for hint in hints:
            found = sorted(set(_matching(node, hint)))
            if found:
                return found
        return []

    def _module(self, path: str) -> ast.Module | None:
        if path not in self.parsed:
            self.parsed[path] = self._parse(path)
        return self.parsed[path]

    def _parse(self, path: str) -> ast.Module | None:
        found = self._find(path)
        try:
            return ast.parse(read_bounded(found, _MOST_BYTES)) if found is not None else None
        except (UnreadableInput, SyntaxError, ValueError, RecursionError, MemoryError):
            return None

    def _find(self, path: str) -> Path | None:
        """The file whose path ends like this one, looked for only inside the folder."""
        parts = [part for part in re.split(r"[/\\]", path) if part not in ("", ".", "..")]
        root = self.folder.resolve()
        for start in range(min(len(parts), _MOST_PARTS)):
            candidate = root.joinpath(*parts[start:])
            try:
                inside = candidate.resolve().is_relative_to(root)
                if inside and candidate.suffix == ".py" and candidate.is_file():
                    return candidate
            except (OSError, ValueError):
                continue
        return None


def called_by(frame: str) -> str:
    """The name under which a frame was called: of a built-in, or of a function in a file."""
    found = _BUILT_IN.match(frame) or _CALLED.search(frame)
    return found[1] if found else ""


def hints_of(child: str, operators: tuple[str, ...]) -> tuple[str, ...]:
    """What to look for: the frame that the place called, then the operators, outermost first."""
    name = called_by(child)
    return ((f"call {name}",) if name else ()) + operators


def _function(module: ast.Module, line: int, name: str) -> Scope | None:
    if name == "<module>":
        return module
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
            first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
            if first <= line <= node.lineno:
                return node
        if name in _SCOPES and isinstance(node, _SCOPES[name]) and _line(node) == line:
            return node
    return None


def _line(node: ast.AST) -> int:
    found = getattr(node, "lineno", 0)
    assert isinstance(found, int)
    return found


def _own(node: ast.AST) -> Iterator[ast.AST]:
    """What runs in the function itself, not in functions defined inside it."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            continue
        yield child
        yield from _own(child)


def _matching(function: Scope, hint: str) -> Iterator[int]:
    names = frozenset((hint.removeprefix("call "),)) if hint.startswith("call ") else None
    wanted = names or _BY_OPERATOR.get(hint) or frozenset((hint.rpartition("::")[2].strip("_"),))
    for node in _own(function):
        if isinstance(node, ast.Call) and _called(node) in wanted:
            yield _line_of(node)
        elif names is None and isinstance(node, ast.Subscript) and _indexes(hint, node):
            yield node.lineno
        elif names is None and hint == "aten::is_nonzero":
            yield from _tested(node)


def _called(node: ast.Call) -> str:
    if isinstance(node.func, ast.Attribute):
        return node.func.attr
    return node.func.id if isinstance(node.func, ast.Name) else ""


def _line_of(node: ast.Call) -> int:
    """Where the name of the called is, which in a chain of calls is not where the chain begins."""
    if isinstance(node.func, ast.Attribute) and node.func.end_lineno is not None:
        return node.func.end_lineno
    return node.lineno


def _indexes(hint: str, node: ast.Subscript) -> bool:
    if isinstance(node.slice, ast.Constant | ast.Slice):
        return False
    stores = isinstance(node.ctx, ast.Store)
    return (hint == "aten::index" and not stores) or (hint in _PUTS and stores)


_PUTS = frozenset(("aten::index_put_", "aten::_index_put_impl_"))


def _tested(node: ast.AST) -> Iterator[int]:
    if isinstance(node, ast.If | ast.While | ast.IfExp | ast.Assert):
        yield node.test.lineno
    elif isinstance(node, ast.BoolOp):
        yield from (value.lineno for value in node.values)
