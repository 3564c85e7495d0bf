"""Writes a form with a match's own expressions in it, and refuses what would compute something else."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator, Mapping

from torchtrim.rewriter.fix import Edit, Match
from torchtrim.source.facts import Refused
from torchtrim.source.forms import form
from torchtrim.source.purity import is_pure, is_simple
from torchtrim.source.source import Source, within

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
) -> tuple[Edit, ...]:
    """The edits that put the template in the place of the match.

    Its capitals become the match's parts, in parentheses where they need some; `torch.` becomes what
    the file calls it. A part that is there more than once and is more than a name is computed in a
    statement before, under the name that `names` gives it; not one of `apart`, of which one alone runs.
    Raises `Refused` where that cannot be, and where something with an effect would run twice, in another
    order or not at all.
    """
    source = match.source
    written = [name for name in _words(template) if name in match.parts]
    counts = Counter(written)
    hoisted: dict[str, str] = {}
    for name, count in counts.items():
        if count > 1 and name not in apart.split() and not is_simple(match.parts[name]):
            hoisted[name] = fresh(source, match.node, (names or {}).get(name, name.lower()))
    _check_effects(match, written)
    before = "".join(f"{new} = {match.text(name)}\n" for name, new in hoisted.items())
    text, imports = filled(match, template, hoisted)
    if isinstance(match.node, ast.expr) and not isinstance(form(template), _ATOMS):
        text = text if _stands_alone(source, match.node) else f"({text})"
    edits = [Edit(source.start(match.node), source.end(match.node), text), *imports]
    if before:
        edits.insert(0, insert_before(source, match.node, before))
    check_comments(source, edits)
    return tuple(edits)


def replace_if(
    match: Match, test: str, template: str, *, names: Mapping[str, str], apart: str = ""
) -> tuple[Edit, ...]:
    """The edits that put the template in the place of a matched statement where the test holds, which has
    capitals too, and else leave the statement as it is.

    `names` and `apart` are as `replace` takes them.
    """
    blanks = match.source.indentation(match.source.statement(match.node))
    if blanks is None:
        raise Refused("the statement shares its line with another. Give each its own line")
    lines = (f"if {test}:", f"    {template}", "else:", f"    {match.form}")
    return replace(match, f"{match.source.newline}{blanks}".join(lines), names, apart)


def filled(
    match: Match, template: str, given: Mapping[str, str] | None = None
) -> tuple[str, tuple[Edit, ...]]:
    """The template with the match's parts in it, or with the texts given; and the imports it needs."""
    source = match.source
    imports: list[Edit] = []

    def put(found: re.Match[str]) -> str:
        word = found[0]
        if word.startswith("**"):
            return ", ".join(source.segment(one) for one in match.keywords.get(word[2:], ()))
        if word in ("torch", "math"):
            alias = source.alias(word)
            if alias is None:
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


def torch_of(source: Source) -> tuple[str, tuple[Edit, ...]]:
    """What the file calls torch, and the import that it needs for that."""
    alias = source.alias("torch")
    return ("torch", (add_import(source, "torch"),)) if alias is None else (alias, ())


def atom(source: Source, node: ast.expr) -> str:
    """The node's text, in parentheses unless anything may stand next to it."""
    text = source.segment(node)
    return text if isinstance(node, _ATOMS) and not isinstance(node, ast.Constant) else f"({text})"


def instead(source: Source, node: ast.expr, text: str) -> Edit:
    """The edit that puts an expression in the place of another, in parentheses where it needs some."""
    loose = not isinstance(form(text), _ATOMS) and not _stands_alone(source, node)
    return Edit(source.start(node), source.end(node), f"({text})" if loose else text)


def insert_before(source: Source, node: ast.AST, lines: str) -> Edit:
    """The edit that puts lines before the node's statement.

    Raises `Refused` where they would run more or less often than the node, or another effect first.
    """
    statement = source.statement(node)
    blanks = source.indentation(statement)
    if blanks is None or not runs_first(source, node):
        raise Refused(
            "a part of it would have to be computed in a statement before, and what is around it "
            "decides whether and when it runs. Give that part a name first"
        )
    text = "".join(f"{blanks}{line}{source.newline}" for line in lines.splitlines())
    at = source.line_start(statement.lineno)
    return Edit(at, at, text)


def insert_after(source: Source, statement: ast.stmt, lines: str) -> Edit:
    """The edit that puts lines after a statement, at its depth."""
    blanks = source.indentation(statement)
    if blanks is None:
        raise Refused("the statement shares its line with another. Give each its own line")
    end = source.end(statement)
    rest = source.text[end:].partition("\n")[0]
    if rest.strip() and not rest.strip().startswith("#"):
        raise Refused("the statement shares its line with another. Give each its own line")
    at = end + len(rest)
    if at >= len(source.text):
        return Edit(
            at, at, "".join(f"{source.newline}{blanks}{line}" for line in lines.splitlines())
        )
    at += 1
    return Edit(at, at, "".join(f"{blanks}{line}{source.newline}" for line in lines.splitlines()))


def runs_first(source: Source, node: ast.AST) -> bool:
    """Whether computing the node before its statement is the same: always once, and no effect before."""
    statement = source.statement(node)
    if isinstance(statement, ast.While | ast.Match | ast.Try) or _is_elif(source, statement):
        return False
    if isinstance(statement, ast.For) and not within(node, statement.iter):
        return False
    inner = node
    for outer in source.around(node):
        if outer is statement:
            break
        if isinstance(outer, ast.Lambda | ast.comprehension | ast.ListComp | ast.SetComp):
            return False
        if isinstance(outer, ast.DictComp | ast.GeneratorExp):
            return False
        if isinstance(outer, ast.BoolOp) and outer.values[0] is not inner:
            return False
        if isinstance(outer, ast.IfExp) and outer.test is not inner:
            return False
        inner = outer
    return all(is_pure(call, source) for call in _calls_before(source, statement, node))


def add_import(source: Source, module: str) -> Edit:
    """The edit that imports a module after the file's other imports."""
    last = None
    for statement in source.tree.body:
        is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        if isinstance(statement, ast.Import | ast.ImportFrom) or (last is None and is_text):
            last = statement
    if last is None:
        return Edit(0, 0, f"import {module}{source.newline}{source.newline}")
    return insert_after(source, last, f"import {module}")


def fresh(source: Source, node: ast.AST, name: str) -> str:
    """The name, or one like it that means nothing yet in the node's function, nor in the module."""
    taken = {one.id for one in source.each(ast.Name)}
    taken |= set(source.imported) | set(source.bound(source.function(node)))
    if name not in taken:
        return name
    return next(new for number in range(2, 10**6) if (new := f"{name}_{number}") not in taken)


def check_comments(source: Source, edits: list[Edit] | tuple[Edit, ...]) -> None:
    """Raises `Refused` where a comment of the source would be lost."""
    for edit in edits:
        for comment in comments(source.text[edit.start : edit.end]):
            if comment not in edit.text:
                raise Refused(
                    f"the comment {comment[:60]!r} within it would be lost. Move it first"
                )


def comments(text: str) -> Iterator[str]:
    """The comments of a piece of source."""
    if "#" not in text:
        return
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                yield token.string
    except (tokenize.TokenError, IndentationError):
        return


def _words(template: str) -> list[str]:
    return [found[0] for found in _WORD.finditer(template)]


def _in_place(text: str, node: ast.expr, template: str, found: re.Match[str]) -> str:
    """The text, in parentheses unless the template delimits it or it needs none."""
    before = template[: found.start()].rstrip()[-1:]
    after = template[found.end() :].lstrip()[:1]
    delimited = before in ("", "(", "[", ",", "=") and after in ("", ")", "]", ",")
    if "\n" in text and before not in ("(", "[", ","):
        return f"({text})"
    if delimited and not isinstance(node, ast.Tuple | ast.Starred | ast.NamedExpr | ast.Yield):
        return text
    if isinstance(node, ast.Tuple) and before == "[" and after == "]":
        return text
    whole_number = isinstance(node, ast.Constant) and after == "."
    if isinstance(node, _ATOMS) and not whole_number:
        return text
    if isinstance(node, ast.Tuple) and text.startswith("("):
        return text
    return f"({text})"


def _stands_alone(source: Source, node: ast.expr) -> bool:
    """Whether nothing around the node could bind a part of what is written there."""
    outer = source.parents[node]
    if isinstance(outer, ast.Subscript):
        return outer.slice is node
    if isinstance(outer, ast.Call):
        return outer.func is not node
    return isinstance(outer, _DELIMITING)


def _check_effects(match: Match, written: list[str]) -> None:
    own = {name: node for name, node in match.parts.items() if within(node, match.node)}
    impure = {name for name, node in own.items() if not is_pure(node, match.source)}
    at = sorted(impure, key=lambda name: match.source.start(match.parts[name]))
    if [name for name in written if name in impure] != at:
        raise Refused(
            f"`{match.text(at[0])[:60]}` may do more than compute a value, and would run more often, less "
            "often or at another time. Give its result a name first"
        )


def _is_elif(source: Source, statement: ast.stmt) -> bool:
    outer = source.parents.get(statement)
    return (
        isinstance(statement, ast.If)
        and isinstance(outer, ast.If)
        and outer.orelse == [statement]
        and source.text.startswith("elif", source.start(statement))
    )


def _calls_before(source: Source, statement: ast.stmt, node: ast.AST) -> Iterator[ast.Call]:
    """The calls of the statement's own line of code that run before the node."""
    outer = set(source.around(node))
    body = {id(one) for part in ("body", "orelse") for one in getattr(statement, part, ())}
    for one in ast.iter_child_nodes(statement):
        if id(one) in body:
            continue
        for inner in ast.walk(one):
            if (
                isinstance(inner, ast.Call)
                and inner not in outer
                and not within(inner, node)
                and source.start(inner) < source.start(node)
            ):
                yield inner
