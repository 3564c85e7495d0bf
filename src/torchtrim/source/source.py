"""One file of user code: its tree, where each node is in the text, and what names mean."""

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
from torchtrim.records.seen import Spot

_LINE = re.compile(r"\r\n|\r|\n")
_NAME = re.compile(r"\w+")
_MOST_BYTES = 4 * 2**20
_NO_NODES = frozenset(("ctx", "op", "ops", "id", "attr", "arg", "kind", "type_comment", "level"))
_HOLDING = {
    kind: tuple(name for name in kind._fields if name not in _NO_NODES)
    for kind in vars(ast).values()
    if isinstance(kind, type) and issubclass(kind, ast.AST)
}
"""The fields of each type of node in which other nodes are."""
_Node = TypeVar("_Node", bound=ast.AST)
Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
Loop = ast.For | ast.AsyncFor | ast.While
Site = tuple[type[ast.AST], str]
"""A type of node, and of a call the last name of its function; `""` is any."""


class Source:
    """A file's text, parsed. Raises `UnreadableInput` where it is no Python.

    Offsets are in characters. The tree is never changed: edits are spans of the text, so what is not
    edited keeps its form.
    """

    def __init__(
        self,
        path: str,
        text: str,
        tree: ast.Module | None = None,
        lines: list[int] | None = None,
    ) -> None:
        self.path = path
        self.text = text
        try:
            self.tree = tree or ast.parse(text)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            line = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
            raise UnreadableInput(f"{path}{line} is no Python that can be read: {error}.") from None
        self._lines = lines or [0, *(found.end() for found in _LINE.finditer(text))]
        self._bound: dict[ast.AST, frozenset[str]] = {}
        self._has: dict[str, bool] = {}
        self.memo: dict[str, tuple[Any, ...]] = {}
        self.fallback: dict[ast.AST, bool] = {}
        self.behind: dict[ast.AST, bool] = {}
        self.private: dict[tuple[ast.AST, str], bool] = {}
        self.private_but: dict[ast.AST, frozenset[str]] = {}

    @property
    def nodes(self) -> tuple[ast.AST, ...]:
        """Every node of the tree, as `ast.walk` gives them, but for operators. The tree is walked once."""
        return self._walked[0]

    @property
    def parents(self) -> dict[ast.AST, ast.AST]:
        """The node around each node."""
        return self._walked[1]

    @cached_property
    def _walked(self) -> tuple[tuple[ast.AST, ...], dict[ast.AST, ast.AST]]:
        nodes: list[ast.AST] = [self.tree]
        parents: dict[ast.AST, ast.AST] = {}
        for node in nodes:
            inner = children(node)
            parents.update(dict.fromkeys(inner, node))
            nodes += inner
        return tuple(nodes), parents

    def only(self, lines: Iterable[int]) -> Source:
        """The same file with fewer functions and classes in its tree: those around one of the lines.

        Classes of the file from which these inherit stay, and so does what is neither.
        """
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
        return Source(
            self.path, self.text, ast.Module(kept[::-1], self.tree.type_ignores), self._lines
        )

    def has(self, words: Collection[str]) -> bool:
        """Whether each of the words is somewhere in the text, alone or in another."""
        for word in words:
            if word not in self._has:
                self._has[word] = word in self.text
        return all(map(self._has.__getitem__, words))

    @cached_property
    def words(self) -> frozenset[str]:
        """Every name in the text, comments included."""
        return frozenset(_NAME.findall(self.text))

    def each(self, kind: type[_Node]) -> Iterator[_Node]:
        """The nodes of a type, in the order of the tree."""
        return (node for _, node in self._sites.get((kind, ""), ()))  # type: ignore[misc]

    def at(self, sites: Iterable[Site]) -> Iterator[ast.AST]:
        """The nodes at some sites, in the order of the tree."""
        found = [one for site in set(sites) for one in self._sites.get(site, ())]
        return (node for _, node in sorted(found, key=lambda one: one[0]))

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
        """What names of the file mean: `{"F": "torch.nn.functional"}`."""
        return dict(_imported(self.nodes))

    def start(self, node: ast.AST) -> int:
        """Where the node begins in the text."""
        return self._offset(node.lineno, node.col_offset)  # type: ignore[attr-defined]

    def end(self, node: ast.AST) -> int:
        """Where the text goes on after the node."""
        return self._offset(node.end_lineno, node.end_col_offset)  # type: ignore[attr-defined]

    def segment(self, node: ast.AST) -> str:
        """The node's text, as written."""
        return self.text[self.start(node) : self.end(node)]

    def line_start(self, line: int) -> int:
        """Where a line, counted from 1, begins; the end of the text for one behind the last."""
        return self._lines[line - 1] if line <= len(self._lines) else len(self.text)

    def line_of(self, offset: int) -> int:
        """The line, counted from 1, that holds an offset."""
        return bisect_right(self._lines, offset)

    def around(self, node: ast.AST) -> Iterator[ast.AST]:
        """The nodes around a node, innermost first."""
        while (outer := self.parents.get(node)) is not None:
            yield outer
            node = outer

    def statement(self, node: ast.AST) -> ast.stmt:
        """The innermost statement that holds the node."""
        if isinstance(node, ast.stmt):
            return node
        return next(outer for outer in self.around(node) if isinstance(outer, ast.stmt))

    def function(self, node: ast.AST) -> Function | ast.Module:
        """The function whose code the node is, or the module."""
        for outer in self.around(node):
            if isinstance(outer, Function | ast.Module):
                return outer
        return self.tree

    def loop(self, node: ast.AST) -> Loop | None:
        """The innermost loop of the same function around the node."""
        for outer in self.around(node):
            if isinstance(outer, Loop):
                return outer
            if isinstance(outer, Function | ast.ClassDef):
                break
        return None

    def block(self, statement: ast.stmt) -> list[ast.stmt]:
        """The statements of this one's block."""
        outer = self.parents[statement]
        for name in ("body", "orelse", "finalbody"):
            found = getattr(outer, name, None)
            if isinstance(found, list) and any(one is statement for one in found):
                return found
        return [statement]

    def dotted(self, node: ast.AST) -> str | None:
        """What a name or an attribute means, by the file's imports: `"torch.nn.functional.cross_entropy"`.

        None where it does not begin with something imported.
        """
        names: list[str] = []
        while isinstance(node, ast.Attribute):
            names.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name) or node.id not in self.imported:
            return None
        if any(node.id in self.bound(around) for around in self._functions(node)):
            return None
        return ".".join([self.imported[node.id], *reversed(names)])

    def bound(self, function: ast.AST) -> frozenset[str]:
        """The names that a function's own code binds: parameters, assignments, loops, imports aside."""
        if function not in self._bound:
            self._bound[function] = frozenset(_bound_in(function))
        return self._bound[function]

    def _functions(self, node: ast.AST) -> Iterator[ast.AST]:
        return (outer for outer in self.around(node) if isinstance(outer, Function))

    def alias(self, module: str) -> str | None:
        """A name under which the file has a module, None if it has none."""
        return next((name for name, full in self.imported.items() if full == module), None)

    def indentation(self, statement: ast.stmt) -> str | None:
        """The blanks before a statement; None if something else is before it in its line."""
        first: ast.AST = statement
        decorators = getattr(statement, "decorator_list", [])
        if decorators:
            first = decorators[0]
        before = self.text[self.line_start(first.lineno) : self.start(first)]  # type: ignore[attr-defined]
        return before if not before.strip() else None

    @property
    def newline(self) -> str:
        """How the file ends its lines."""
        found = _LINE.search(self.text)
        return found[0] if found else "\n"

    def _offset(self, line: int, column: int) -> int:
        start = self._lines[line - 1]
        end = self._lines[line] if line < len(self._lines) else len(self.text)
        text = self.text[start:end]
        return start + (column if text.isascii() else len(text.encode()[:column].decode()))


def children(node: ast.AST) -> list[ast.AST]:
    """The nodes right below a node, but for operators, in the order of the code."""
    found: list[ast.AST] = []
    for name in _HOLDING[type(node)]:
        value = getattr(node, name, None)
        if isinstance(value, ast.AST):
            found.append(value)
        elif isinstance(value, list):
            found += [one for one in value if isinstance(one, ast.AST)]
    return found


def called(function: ast.AST) -> str:
    """The last name of a called function; `""` where it has none."""
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def spot(node: ast.AST) -> Spot:
    """Where a node is, as another process that parses the same text finds it."""
    return (node.lineno, node.col_offset, node.end_lineno, node.end_col_offset)  # type: ignore[attr-defined]


def read_source(path: Path) -> tuple[str, str]:
    """The file's text with its line ends as they are, and its encoding.

    Raises `UnreadableInput` for what is missing, too large, no regular file or no text.
    """
    try:
        data = read_bounded(path, _MOST_BYTES)
        encoding = tokenize.detect_encoding(io.BytesIO(data).readline)[0]
        return data.decode(encoding), encoding
    except (UnicodeDecodeError, SyntaxError, LookupError) as error:
        raise UnreadableInput(f"{path} is no text in the encoding it claims: {error}.") from None


def _imported(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, str]]:
    for node in nodes:
        if isinstance(node, ast.Import):
            for name in node.names:
                yield (
                    (name.asname, name.name)
                    if name.asname
                    else (
                        name.name.partition(".")[0],
                        name.name.partition(".")[0],
                    )
                )
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for name in node.names:
                yield name.asname or name.name, f"{node.module}.{name.name}"


def _bound_in(function: ast.AST) -> Iterator[str]:
    if isinstance(function, Function):
        arguments = function.args
        for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
            yield one.arg
        for extra in (arguments.vararg, arguments.kwarg):
            if extra is not None:
                yield extra.arg
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
    """Whether a node is another, or a part of it."""
    return any(one is node for one in ast.walk(around))
