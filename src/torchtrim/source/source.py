"""A file of user code: its tree, positions of nodes in the text, and the meaning of names."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from torchtrim.errors import UnreadableInput
from torchtrim.records.files import read_bounded
from torchtrim.records.probes import SourceSpan
from torchtrim.source.nodes import called

_LINE = re.compile(r"\r\n|\r|\n")
_NAME = re.compile(r"\w+")
_MOST_BYTES = 4 * 2**20
"""Arbitrary: far above any source file written by hand."""
_NO_NODES = frozenset(("ctx", "op", "ops", "id", "attr", "arg", "kind", "type_comment", "level"))
_HOLDING = {
    kind: tuple(name for name in kind._fields if name not in _NO_NODES)
    for kind in vars(ast).values()
    if isinstance(kind, type) and issubclass(kind, ast.AST)
}
"""The fields of each node type that hold child nodes."""
_Node = TypeVar("_Node", bound=ast.AST)
Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
Loop = ast.For | ast.AsyncFor | ast.While
Site = tuple[type[ast.AST], str]
"""A node type and, for a call, the last name of its function; `""` matches any."""


class SourceFile:
    """The parsed text of a file. Raises `UnreadableInput` if it is not valid Python.

    Offsets count characters. The tree never changes: edits are spans of the text.
    """

    def __init__(self, path: str, text: str, tree: ast.Module | None = None) -> None:
        self.path, self.text = path, text
        try:
            self.tree = tree or ast.parse(text)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            line = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
            raise UnreadableInput(f"{path}{line} is not valid Python: {error}.") from None
        self._lines = [0, *(found.end() for found in _LINE.finditer(text))]
        self._bound: dict[ast.AST, frozenset[str]] = {}
        self._has: dict[str, bool] = {}
        self.memo: dict[str, tuple[Any, ...]] = {}
        self.private: dict[tuple[ast.AST, str], bool] = {}
        self.private_but: dict[ast.AST, frozenset[str]] = {}

    @cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        """All nodes in the order of `ast.walk`, without operators."""
        return (self.tree, *self.parents)

    @cached_property
    def parents(self) -> dict[ast.AST, ast.AST]:
        """The parent of each node, in the order of `nodes`."""
        nodes: list[ast.AST] = [self.tree]
        parents: dict[ast.AST, ast.AST] = {}
        for node in nodes:
            inner = children(node)
            parents.update(dict.fromkeys(inner, node))
            nodes += inner
        return parents

    def only(self, lines: Iterable[int]) -> SourceFile:
        """Return the file with only the functions and classes at some lines, and their base classes."""
        wanted = sorted(lines)
        kept: list[ast.stmt] = []
        names: set[str] = set()
        for one in reversed(self.tree.body):
            if not isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                kept.append(one)
                continue
            at = bisect_right(wanted, (one.end_lineno or one.lineno))
            if one.name in names or (at and wanted[at - 1] >= one.lineno):
                kept.append(one)
                bases = one.bases if isinstance(one, ast.ClassDef) else []
                names.update(called(base) for base in bases)
        return SourceFile(self.path, self.text, ast.Module(kept[::-1], self.tree.type_ignores))

    def has(self, words: Collection[str]) -> bool:
        """Return True if the text contains each of the words, also inside other words."""
        for word in words:
            if word not in self._has:
                self._has[word] = word in self.text
        return all(map(self._has.__getitem__, words))

    @cached_property
    def words(self) -> frozenset[str]:
        """All names in the text, comments included."""
        return frozenset(_NAME.findall(self.text))

    def each(self, kind: type[_Node]) -> Iterator[_Node]:
        """Yield the nodes of a type, in the order of the tree."""
        return (node for _, node in self._sites.get((kind, ""), ()) if isinstance(node, kind))

    def at(self, sites: Iterable[Site]) -> Iterator[ast.AST]:
        """Yield the nodes at the sites, in the order of the tree."""
        found = [one for site in set(sites) for one in self._sites.get(site, ())]
        return (node for _, node in sorted(found, key=lambda one: one[0]))

    def calls(self, *names: str) -> Iterator[ast.Call]:
        """Yield the calls whose function has one of the last names, in the order of the tree."""
        sites = ((ast.Call, name) for name in names)
        return (node for node in self.at(sites) if isinstance(node, ast.Call))

    @cached_property
    def _sites(self) -> dict[Site, list[tuple[int, ast.AST]]]:
        found: dict[Site, list[tuple[int, ast.AST]]] = {}
        for number, node in enumerate(self.nodes):
            found.setdefault((type(node), ""), []).append((number, node))
            if isinstance(node, ast.Call):
                name = called(node.func)
                if isinstance(node.func, ast.Name):
                    name = self.imported.get(name, name).rpartition(".")[2]
                found.setdefault((ast.Call, name), []).append((number, node))
        return found

    @cached_property
    def imported(self) -> dict[str, str]:
        """Imported names and their targets: `{"F": "torch.nn.functional"}`."""
        return dict(_imported(self.nodes))

    def start(self, node: ast.AST) -> int:
        """Return the offset of the node's first character."""
        return self._offset(*spot(node)[:2])

    def end(self, node: ast.AST) -> int:
        """Return the offset after the node."""
        return self._offset(*spot(node)[2:])

    def segment(self, node: ast.AST) -> str:
        """Return the node's text."""
        return self.text[self.start(node) : self.end(node)]

    def line_start(self, line: int) -> int:
        """Return the offset of a line, counted from 1, or the text's length for a line after the last."""
        return self._lines[line - 1] if line <= len(self._lines) else len(self.text)

    def line_of(self, offset: int) -> int:
        """Return the line, counted from 1, that contains an offset."""
        return bisect_right(self._lines, offset)

    def around(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield the ancestors of a node, innermost first."""
        while (outer := self.parents.get(node)) is not None:
            yield outer
            node = outer

    def statement(self, node: ast.AST) -> ast.stmt:
        """Return the innermost statement that contains the node."""
        if isinstance(node, ast.stmt):
            return node
        return next(outer for outer in self.around(node) if isinstance(outer, ast.stmt))

    def function(self, node: ast.AST) -> Function | ast.Module:
        """Return the function that contains the node, or the module."""
        outer = (one for one in self.around(node) if isinstance(one, Function | ast.Module))
        return next(outer, self.tree)

    def loops(self, node: ast.AST) -> Iterator[Loop]:
        """Yield the loops around the node within its function, innermost first."""
        for outer in self.around(node):
            if isinstance(outer, Loop):
                yield outer
            elif isinstance(outer, Function | ast.ClassDef):
                return

    def loop(self, node: ast.AST) -> Loop | None:
        """Return the innermost loop around the node within its function."""
        return next(self.loops(node), None)

    def block(self, statement: ast.stmt) -> list[ast.stmt]:
        """Return the statements of the statement's block."""
        outer = self.parents[statement]
        blocks = (getattr(outer, name, None) for name in ("body", "orelse", "finalbody"))
        return next(
            (one for one in blocks if isinstance(one, list) and statement in one), [statement]
        )

    def dotted(self, node: ast.AST) -> str | None:
        """Resolve a name or attribute by the imports: `"torch.nn.functional.relu"`, or None."""
        names: list[str] = []
        while isinstance(node, ast.Attribute):
            names.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name) or node.id not in self.imported:
            return None
        functions = (outer for outer in self.around(node) if isinstance(outer, Function))
        if any(node.id in self.bound(outer) for outer in functions):
            return None
        return ".".join([self.imported[node.id], *reversed(names)])

    def bound(self, function: ast.AST) -> frozenset[str]:
        """Return the names that a function binds: parameters, assignments and loops, but not imports."""
        if function not in self._bound:
            self._bound[function] = frozenset(_bound_in(function))
        return self._bound[function]

    def alias(self, module: str) -> str | None:
        """Return a name under which the file imports a module, or None."""
        return next((name for name, full in self.imported.items() if full == module), None)

    def indentation(self, statement: ast.stmt) -> str | None:
        """Return the whitespace before a statement, or None if other code precedes it in its line."""
        first: ast.stmt | ast.expr = [*getattr(statement, "decorator_list", []), statement][0]
        before = self.text[self.line_start(first.lineno) : self.start(first)]
        return before if not before.strip() else None

    @property
    def newline(self) -> str:
        """The file's line ending."""
        found = _LINE.search(self.text)
        return found[0] if found else "\n"

    def _offset(self, line: int, column: int) -> int:
        start = self._lines[line - 1]
        end = self._lines[line] if line < len(self._lines) else len(self.text)
        text = self.text[start:end]
        return start + (column if text.isascii() else len(text.encode()[:column].decode()))


def children(node: ast.AST) -> list[ast.AST]:
    """Return a node's children in the order of the code, without operators."""
    found: list[ast.AST] = []
    for name in _HOLDING[type(node)]:
        value = getattr(node, name, None)
        if isinstance(value, ast.AST):
            found.append(value)
        elif isinstance(value, list):
            found += [child for child in value if isinstance(child, ast.AST)]
    return found


def spot(node: ast.AST) -> SourceSpan:
    """Return a node's position, which is the same in any process that parses the same text."""
    return (node.lineno, node.col_offset, node.end_lineno, node.end_col_offset)  # type: ignore[attr-defined]


def read_source(path: Path) -> tuple[str, str]:
    """Return the text, with its line endings, and encoding of a file. Raises `UnreadableInput`."""
    try:
        data = read_bounded(path, _MOST_BYTES)
        encoding = tokenize.detect_encoding(io.BytesIO(data).readline)[0]
        return data.decode(encoding), encoding
    except (UnicodeDecodeError, SyntaxError, LookupError) as error:
        raise UnreadableInput(f"{path} is not text in the encoding it declares: {error}.") from None


def _imported(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, str]]:
    for node in nodes:
        if isinstance(node, ast.Import):
            for name in node.names:
                top = name.name.partition(".")[0]
                yield (name.asname, name.name) if name.asname else (top, top)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for name in node.names:
                yield name.asname or name.name, f"{node.module}.{name.name}"


def _bound_in(function: ast.AST) -> Iterator[str]:
    if isinstance(function, Function):
        own = function.args
        given = (*own.posonlyargs, *own.args, *own.kwonlyargs, own.vararg, own.kwarg)
        yield from (argument.arg for argument in given if argument is not None)
    pending = children(function)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store | ast.Del):
            yield node.id
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
            continue
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
            yield node.name
        pending += children(node)


def within(node: ast.AST, around: ast.AST) -> bool:
    """Return True if a node is `around` or inside it."""
    return node in ast.walk(around)
