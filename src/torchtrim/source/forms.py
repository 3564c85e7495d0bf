"""Forms: Python patterns whose capitals match any expression.

    X[M.nonzero(as_tuple=True)] = C
    torch.nn.functional.cross_entropy(X[M], Y[M], **REST)

Names of imported modules match under the name that the file gives them. `**REST` matches all keywords that
the form does not name. Equal capitals must match equal expressions.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from functools import cache

from torchtrim.source.nodes import called, keywords_of
from torchtrim.source.source import Site, SourceFile

_CAPITALS = re.compile(r"[A-Z][A-Z0-9]*")


class Bindings:
    """The expressions that a form's capitals matched, and the keywords that `**REST` matched."""

    def __init__(self) -> None:
        self.parts: dict[str, ast.expr] = {}
        self.keywords: dict[str, list[ast.keyword]] = {}


@cache
def form(text: str) -> ast.AST:
    """Return the parsed form: a statement, or an expression where the text is one."""
    (statement,) = ast.parse(text).body
    return statement.value if isinstance(statement, ast.Expr) else statement


def capitals(text: str) -> list[str]:
    """Return the capitals of a form, in order."""
    return [name for name in re.findall(r"\b[A-Za-z_]\w*\b", text) if _CAPITALS.fullmatch(name)]


@cache
def root(text: str) -> Site:
    """Return the site of a form: the type of its root node and, for a call, the function's name."""
    node = form(text)
    name = called(node.func) if isinstance(node, ast.Call) else ""
    return type(node), "" if _CAPITALS.fullmatch(name) else name


@cache
def words(text: str) -> frozenset[str]:
    """Return the names that a file must contain for the form to match anywhere."""
    found: set[str] = set()
    pending = [form(text)]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.keyword) and node.arg is not None:
            found.add(node.arg)
        if _module_name(node) is None:
            pending.extend(ast.iter_child_nodes(node))
    return frozenset(found)


def places(forms: Iterable[str], source: SourceFile) -> Iterator[tuple[ast.AST, str, Bindings]]:
    """Yield each node that matches one of the forms, with the first form that matches."""
    live = [text for text in forms if source.has(words(text))]
    for node in source.at({root(text) for text in live}):
        for text in live:
            if (bound := match_form(text, node, source)) is not None:
                yield node, text, bound
                break


def match_form(text: str, node: ast.AST, source: SourceFile) -> Bindings | None:
    """Match a node against a form. Returns None if it does not match."""
    if not _may_be(root(text), node, source):
        return None
    bound = Bindings()
    return bound if _same(form(text), node, source, bound) else None


def _may_be(site: Site, node: ast.AST, source: SourceFile) -> bool:
    kind, name = site
    if kind in (ast.Name, ast.Attribute):
        return True
    if type(node) is not kind:
        return False
    own = called(node.func) if isinstance(node, ast.Call) else ""
    return name in ("", own) or source.imported.get(own, "").rpartition(".")[2] == name


def equal(one: ast.AST, other: ast.AST) -> bool:
    """Return True if two expressions are the same code, ignoring whitespace and comments."""
    first, second = (ast.dump(node).replace("ctx=Store()", "ctx=Load()") for node in (one, other))
    return first == second


def _same(pattern: ast.AST, node: ast.AST, source: SourceFile, bound: Bindings) -> bool:
    if isinstance(pattern, ast.Name) and _CAPITALS.fullmatch(pattern.id):
        if not isinstance(node, ast.expr):
            return False
        known = bound.parts.setdefault(pattern.id, node)
        return known is node or equal(known, node)
    if (name := _module_name(pattern)) is not None:
        return source.dotted(node) == name
    if type(pattern) is not type(node):
        return False
    if isinstance(pattern, ast.Call) and isinstance(node, ast.Call):
        return _same_call(pattern, node, source, bound)
    return all(
        _same_field(getattr(pattern, field), getattr(node, field, None), source, bound)
        for field in pattern._fields
        if field not in ("ctx", "type_comment", "kind")
    )


def _module_name(pattern: ast.AST) -> str | None:
    """Return the dotted name such as `torch.nn.functional.cross_entropy`, or None if a capital starts it."""
    names: list[str] = []
    while isinstance(pattern, ast.Attribute):
        names.append(pattern.attr)
        pattern = pattern.value
    if isinstance(pattern, ast.Name) and pattern.id in ("torch", "math", "numpy") and names:
        return ".".join([pattern.id, *reversed(names)])
    return None


def _same_call(pattern: ast.Call, node: ast.Call, source: SourceFile, bound: Bindings) -> bool:
    if len(pattern.args) != len(node.args) or any(isinstance(a, ast.Starred) for a in node.args):
        return False
    if not _same(pattern.func, node.func, source, bound):
        return False
    given, wanted = keywords_of(node), keywords_of(pattern)
    rest = wanted.pop(None, None)
    left = [word for word in node.keywords if word.arg not in wanted]
    if len(given) != len(node.keywords) or None in given or not wanted.keys() <= given.keys():
        return False
    if isinstance(rest, ast.Name):
        bound.keywords[rest.id] = left
    elif left:
        return False
    pairs = [*zip(pattern.args, node.args, strict=True)]
    pairs += [(value, given[name]) for name, value in wanted.items()]
    return all(_same(one, other, source, bound) for one, other in pairs)


def _same_field(one: object, other: object, source: SourceFile, bound: Bindings) -> bool:
    if isinstance(one, ast.AST):
        return isinstance(other, ast.AST) and _same(one, other, source, bound)
    if isinstance(one, list):
        return (
            isinstance(other, list)
            and len(one) == len(other)
            and all(_same_field(a, b, source, bound) for a, b in zip(one, other, strict=True))
        )
    return type(one) is type(other) and one == other
