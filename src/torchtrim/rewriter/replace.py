"""Writes a template with a match's own expressions, and refuses to change what is computed."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Container, Iterator, Mapping
from itertools import count

from torchtrim.rewriter.fix import Match, TextEdit, check_comments
from torchtrim.source.branches import is_elif
from torchtrim.source.facts import FixRefused
from torchtrim.source.forms import form
from torchtrim.source.nodes import Comprehension, find_all
from torchtrim.source.operations import is_pure, is_simple
from torchtrim.source.source import SourceFile, within

_WORD = re.compile(r"\*\*[A-Z][A-Z0-9]*\b|\b[A-Z][A-Z0-9]*\b|\b(?:torch|math)(?=\.)")
_ATOMS = (
    ast.Name,
    ast.Attribute,
    ast.Subscript,
    ast.Call,
    ast.Constant,
    ast.List,
    ast.Dict,
    ast.Set,
    ast.ListComp,
    ast.JoinedStr,
)

SHARED_LINE = "the statement shares its line with another. Put each on its own line"
_DELIMITING = (
    ast.Assign,
    ast.AugAssign,
    ast.AnnAssign,
    ast.Return,
    ast.Expr,
    ast.keyword,
    ast.List,
    ast.Tuple,
    ast.Set,
    ast.Dict,
    ast.If,
    ast.While,
)


def replace(
    match: Match, template: str, names: Mapping[str, str] | None = None, apart: str = ""
) -> tuple[TextEdit, ...]:
    """Return the edits that replace the match by the template.

    The template's capitals become the match's parts, in parentheses if needed; `torch.` becomes the file's
    name for it. A part that occurs more than once and is not just a name is computed in a statement before,
    under the name given in `names`. `apart` lists parts that run only once although they occur more often.
    Raises `FixRefused` if that is impossible, or if a side effect would run twice, in another order or not at
    all.
    """
    source = match.source
    written = [name for name in _WORD.findall(template) if name in match.parts]
    hoisted: dict[str, str] = {}
    for name, times in Counter(written).items():
        if times > 1 and name not in apart.split() and not is_simple(match.parts[name]):
            hoisted[name] = fresh(source, match.node, (names or {}).get(name, name.lower()))
    _check_effects(match, written)
    before = "".join(f"{new} = {match.text(name)}\n" for name, new in hoisted.items())
    text, imports = filled(match, template, hoisted)
    if isinstance(match.node, ast.expr) and not isinstance(form(template), _ATOMS):
        text = text if _stands_alone(source, match.node) else f"({text})"
    edits = (TextEdit.of(source, match.node, text), *imports)
    if before:
        edits = (insert_before(source, match.node, before), *edits)
    check_comments(source, edits)
    return edits


def filled(
    match: Match, template: str, given: Mapping[str, str] | None = None
) -> tuple[str, tuple[TextEdit, ...]]:
    """Return the template with the match's parts, or with the given texts, and the imports it needs."""
    source = match.source
    imports: list[TextEdit] = []

    def put(found: re.Match[str]) -> str:
        word = found[0]
        if word.startswith("**"):
            return ", ".join(source.segment(one) for one in match.keywords.get(word[2:], ()))
        if word in ("torch", "math"):
            if (alias := source.alias(word)) is None:
                imports[:] = [add_import(source, word)]
            return alias or word
        if given and word in given:
            return given[word]
        if word not in match.parts:
            return word
        return _in_place(match.text(word), match.parts[word], template, found)

    text = _WORD.sub(put, template)
    text = re.sub(r",\s*\)", ")", text) if "**" in template else text
    return text, tuple(imports)


def torch_of(source: SourceFile) -> tuple[str, tuple[TextEdit, ...]]:
    """Return the file's name for torch, and the import needed for it."""
    alias = source.alias("torch")
    return ("torch", (add_import(source, "torch"),)) if alias is None else (alias, ())


def atom(source: SourceFile, node: ast.expr) -> str:
    """Return the node's text, in parentheses unless it can stand next to any operator."""
    text = source.segment(node)
    return text if isinstance(node, _ATOMS) and not isinstance(node, ast.Constant) else f"({text})"


def instead(source: SourceFile, node: ast.expr, text: str) -> TextEdit:
    """Return the edit that replaces an expression, with parentheses if needed."""
    loose = not isinstance(form(f"({text})"), _ATOMS) and not _stands_alone(source, node)
    return TextEdit.of(source, node, f"({text})" if loose else text)


def insert_before(source: SourceFile, node: ast.AST, lines: str) -> TextEdit:
    """Return the edit that inserts lines before the node's statement.

    Raises `FixRefused` if they would run more or less often than the node, or before another side effect.
    """
    statement = source.statement(node)
    if source.indentation(statement) is None or not runs_first(source, node):
        raise FixRefused(
            "a part of it would be computed in a statement before, too often or too early. "
            "Assign that part to a name first"
        )
    return above(source, statement, lines)


def above(source: SourceFile, statement: ast.stmt, lines: str) -> TextEdit:
    """Return the edit that inserts lines above a statement, at its indentation."""
    blanks = need_indentation(source, statement)
    text = "".join(f"{blanks}{line}{source.newline}" for line in lines.splitlines())
    at = source.line_start(statement.lineno)
    return TextEdit(at, at, text)


def need_indentation(source: SourceFile, statement: ast.stmt) -> str:
    """Return the whitespace before a statement. Raises `FixRefused` if other code shares its line."""
    if (blanks := source.indentation(statement)) is None:
        raise FixRefused(SHARED_LINE)
    return blanks


def insert_after(source: SourceFile, statement: ast.stmt, lines: str) -> TextEdit:
    """Return the edit that inserts lines after a statement, at its indentation."""
    blanks = need_indentation(source, statement)
    end = source.end(statement)
    rest = source.text[end:].partition("\n")[0]
    if rest.strip() and not rest.strip().startswith("#"):
        raise FixRefused(SHARED_LINE)
    at = end + len(rest)
    last = at >= len(source.text)
    before, after = (source.newline, "") if last else ("", source.newline)
    text = "".join(f"{before}{blanks}{line}{after}" for line in lines.splitlines())
    return TextEdit(at + (not last), at + (not last), text)


def deleted(source: SourceFile, statement: ast.stmt) -> TextEdit:
    """Return the edit that deletes a statement with its line; alone in its block or line, it is a `pass`."""
    start, end = source.start(statement), source.end(statement)
    blanks = source.indentation(statement)
    rest = source.text[end:].partition("\n")[0]
    if blanks is None or rest.strip() or len(source.block(statement)) == 1:
        return TextEdit(start, end, "pass")
    return TextEdit(start - len(blanks), min(end + len(rest) + 1, len(source.text)), "")


def runs_first(source: SourceFile, node: ast.AST) -> bool:
    """Return True if the node can be computed before its statement: it runs once, after no side effect."""
    statement = source.statement(node)
    if isinstance(statement, ast.While | ast.Match | ast.Try) or is_elif(source, statement):
        return False
    if isinstance(statement, ast.For) and not within(node, statement.iter):
        return False
    inner = node
    for outer in source.around(node):
        if outer is statement:
            break
        if isinstance(outer, ast.Lambda | ast.comprehension | Comprehension):
            return False
        if isinstance(outer, ast.BoolOp) and outer.values[0] is not inner:
            return False
        if isinstance(outer, ast.IfExp) and outer.test is not inner:
            return False
        inner = outer
    return all(is_pure(call, source) for call in _calls_before(source, statement, node))


def add_import(source: SourceFile, module: str) -> TextEdit:
    """Return the edit that imports a module after the file's other imports."""
    last = None
    for statement in source.tree.body:
        is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        if isinstance(statement, ast.Import | ast.ImportFrom) or (last is None and is_text):
            last = statement
    if last is None:
        return TextEdit(0, 0, f"import {module}{source.newline}{source.newline}")
    return insert_after(source, last, f"import {module}")


def added_keyword(source: SourceFile, call: ast.Call, text: str) -> TextEdit:
    """Return the edit that adds a keyword to a call."""
    given = [source.end(one) for one in (*call.args, *(word.value for word in call.keywords))]
    close = source.end(call) - 1
    if not given:
        return TextEdit(close, close, text)
    rest = source.text[max(given) : close]
    at = max(given) + (rest.rindex(")") + 1 if ")" in rest and "#" not in rest else 0)
    return TextEdit(at, at, f", {text}")


def fresh(source: SourceFile, node: ast.AST, name: str) -> str:
    """Return the name, or a variant of it that is unused in the node's function and in the module."""
    taken = {other.id for other in source.each(ast.Name)}
    taken |= source.imported.keys() | source.bound(source.function(node))
    return unused(name, taken)


def unused(name: str, taken: Container[str]) -> str:
    """Return the name, or the first of `name_2`, `name_3`, ... that is not taken."""
    variants = (f"{name}_{number}" if number > 1 else name for number in count(1))
    return next(variant for variant in variants if variant not in taken)


def _in_place(text: str, node: ast.expr, template: str, found: re.Match[str]) -> str:
    """Return the text, in parentheses unless the template delimits it or it needs none."""
    before = template[: found.start()].rstrip()[-1:]
    after = template[found.end() :].lstrip()[:1]
    delimited = before in ("", "(", "[", ",", "=") and after in ("", ")", "]", ",")
    if "\n" in text and before not in ("(", "[", ","):
        return f"({text})"
    if isinstance(node, ast.Tuple):
        bare = (before == "[" and after == "]") or text.startswith("(")
    else:
        whole_number = isinstance(node, ast.Constant) and after == "."
        bare = isinstance(node, _ATOMS) and not whole_number
        bare |= delimited and not isinstance(node, ast.Starred | ast.NamedExpr | ast.Yield)
    return text if bare else f"({text})"


def _stands_alone(source: SourceFile, node: ast.expr) -> bool:
    """Return True if no operator around the node could bind to a part of its replacement."""
    outer = source.parents[node]
    if isinstance(outer, ast.Subscript):
        return outer.slice is node
    if isinstance(outer, ast.Call):
        return outer.func is not node
    return isinstance(outer, _DELIMITING)


def _check_effects(match: Match, written: list[str]) -> None:
    source, parts = match.source, match.parts.items()
    own = [part for part in parts if within(part[1], match.node) and not is_pure(part[1], source)]
    impure = [name for name, _ in sorted(own, key=lambda part: source.start(part[1]))]
    if [name for name in written if name in impure] != impure:
        raise FixRefused(
            f"`{match.text(impure[0])[:60]}` may have a side effect, and would run more often, less often or "
            "at another time. Assign its result to a name first"
        )


def _calls_before(source: SourceFile, statement: ast.stmt, node: ast.AST) -> Iterator[ast.Call]:
    """Yield the calls in the statement's own code, without its body, that run before the node."""
    later = {*source.around(node), *ast.walk(node)}
    body = [*getattr(statement, "body", ()), *getattr(statement, "orelse", ())]
    for part in ast.iter_child_nodes(statement):
        if part not in body:
            for call in find_all(part, ast.Call):
                if call not in later and source.start(call) < source.start(node):
                    yield call
