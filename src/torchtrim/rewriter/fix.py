"""Fixes, their matches and their rewrites; and the discovery of all fixes.

To add a fix, add a file to `fixes/` that defines `FIX`, or `FIXES` for a family.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import io
import pkgutil
import sys
import tokenize
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Literal, NamedTuple, TypeVar

from torchtrim.core.isolation import Failure, collected, isolated, note
from torchtrim.records.probes import ObservedValue, Probe
from torchtrim.source.facts import Facts, FixRefused, of_part
from torchtrim.source.forms import places
from torchtrim.source.source import SourceFile, spot

Equivalence = Literal["BITWISE", "ROUNDING"]
_Node = TypeVar("_Node", bound=ast.AST)


class TextEdit(NamedTuple):
    """A span of the text and its replacement."""

    start: int
    end: int
    text: str

    @classmethod
    def of(cls, source: SourceFile, node: ast.AST, text: str) -> TextEdit:
        """Return the edit that writes a text instead of a node."""
        return cls(source.start(node), source.end(node), text)


@dataclass(frozen=True, kw_only=True)
class Match:
    """A place in the source that a fix matches.

    `node` is the code to replace and `parts` its expressions by name, which the fix wants to observe.
    `keywords` are those that `**REST` of the form matched, and `form` is the matching form. `begin` is the
    first node of the lines with the sync, if it precedes `node`. `syncs` are the nodes that this fix handles,
    if other syncs in `node` remain.
    """

    fix: Fix
    source: SourceFile
    node: ast.AST
    parts: Mapping[str, ast.expr]
    keywords: Mapping[str, list[ast.keyword]] = field(default_factory=dict)
    form: str = ""
    begin: ast.AST | None = None
    syncs: tuple[ast.AST, ...] = ()

    @property
    def lines(self) -> tuple[int, int]:
        """First and last line of the statement's own code, without its body."""
        statement = self.source.statement(self.node)
        if self.begin is not None:
            return spot(self.begin)[0], spot(self.node)[2]
        if self.node is not statement or not hasattr(statement, "body"):
            return spot(self.node)[0], spot(self.node)[2]
        return spot(statement)[0], spot(statement)[2]

    def node_as(self, kind: type[_Node]) -> _Node:
        """Return the node, which is of the type that the fix finds."""
        assert isinstance(self.node, kind)
        return self.node

    def text(self, part: str) -> str:
        """Return the source of a part."""
        return self.source.segment(self.parts[part])

    def need(
        self,
        facts: Facts,
        part: str,
        claim: str,
        test: Callable[[ObservedValue], bool],
        *,
        static: bool = False,
    ) -> None:
        """Require that a part passes a test. `static`: without a run, the source has to show that."""
        holds = of_part(part, test)
        facts.need(f"`{self.text(part)[:60]}` {claim}", holds, static=holds if static else None)

    def probe(self, number: int) -> Probe:
        """Return the probe that observes the values the fix needs."""
        parts = {
            name: spot(node)
            for name, node in self.parts.items()
            if not isinstance(node, ast.Slice | ast.Starred)
        }
        return Probe(number=number, path=self.source.path, parts=parts)


Find = Callable[[SourceFile], Iterator[Match]]


@dataclass(frozen=True, kw_only=True)
class Rewrite:
    """The edits of a fix at one match, ready to be applied.

    `equivalence` is the most that the certificate may claim. `open_needs` are assumptions that no run has
    shown; `risk` says what may differ even if they hold. A rewrite is safe only without either. With `advice`
    it is never applied: only a person can decide what that says.
    """

    match: Match
    edits: tuple[TextEdit, ...]
    equivalence: Equivalence
    open_needs: tuple[str, ...] = ()
    risk: str = ""
    advice: str = ""

    @property
    def safe(self) -> bool:
        """True if it may be applied without `--unsafe-fixes`."""
        return not (self.open_needs or self.risk or self.advice)


class Writing(NamedTuple):
    """The edits of a fix, and what may differ even if all its needs are met.

    `advice`: what a person has to decide before copying the edits, which are never applied then.
    """

    edits: tuple[TextEdit, ...]
    risk: str = ""
    equivalence: Equivalence | None = None
    advice: str = ""


@dataclass(frozen=True, kw_only=True)
class Fix:
    """A way to write a place of the source without a host-device sync.

    `codes` are the rules whose findings it fixes. `find` yields the matching places. `write` returns the
    replacement, given the facts: it calls `facts.need` for each assumption and raises `FixRefused` if the fix
    would change the result. `doc` is the documentation: a summary line, then the reason, the conditions and
    the refusals. A fix in its own file takes `name` and `doc` from the file.
    """

    codes: tuple[str, ...]
    equivalence: Equivalence
    find: Find
    write: Callable[[Match, Facts], Writing]
    name: str = ""
    doc: str = ""

    def __post_init__(self) -> None:
        """Take the name and documentation of the file as defaults."""
        home = self.write.__module__
        object.__setattr__(self, "name", self.name or home.rpartition(".")[2])
        doc = self.doc or sys.modules[home].__doc__ or ""
        object.__setattr__(self, "doc", inspect.cleandoc(doc))

    def places(self, source: SourceFile) -> tuple[Match, ...]:
        """Return the matches in a source, found only once."""
        if self.name not in source.memo:
            chosen: list[Match] = []
            with isolated("fix", self.name):
                chosen += self.find(source)
            source.memo[self.name] = tuple(chosen)
        return source.memo[self.name]

    @property
    def summary(self) -> str:
        """The first sentence of the documentation."""
        return self.doc.partition("\n\n")[0].replace("\n", " ")

    def rewrite(self, match: Match, facts: Facts) -> Rewrite:
        """Return the rewrite of one place. Raises `FixRefused` with the reason if there is none."""
        written: Writing | None = None
        with isolated("fix", self.name, passes=(FixRefused,)):
            written = self.write(match, facts)
        if written is None:
            raise FixRefused("it failed, which is a bug in torchtrim. Write this place by hand.")
        check_comments(match.source, written.edits)
        return Rewrite(
            match=match,
            edits=written.edits,
            equivalence=written.equivalence or self.equivalence,
            open_needs=tuple(facts.missing),
            risk=written.risk,
            advice=written.advice,
        )


def check_comments(source: SourceFile, edits: Iterable[TextEdit]) -> None:
    """Raise `FixRefused` if an edit would drop a comment."""
    for edit in edits:
        for comment in comments(source.text[edit.start : edit.end]):
            if comment not in edit.text:
                raise FixRefused(
                    f"the comment {comment[:60]!r} inside it would be lost. Move it first"
                )


def comments(text: str) -> Iterator[str]:
    """Yield the comments in a piece of source."""
    if "#" in text:
        with contextlib.suppress(tokenize.TokenError, IndentationError):
            for token in tokenize.generate_tokens(io.StringIO(text).readline):
                if token.type == tokenize.COMMENT:
                    yield token.string


def of_forms(fix: Callable[[], Fix], *forms: str, without: Container[str] = ()) -> Find:
    """Return a `find` that yields each place matching one of the forms; earlier forms win.

    `without` are capitals that are not parts, since they cannot be observed.
    """

    def find(source: SourceFile) -> Iterator[Match]:
        for node, text, bound in places(forms, source):
            parts = {name: part for name, part in bound.parts.items() if name not in without}
            words = bound.keywords
            yield Match(fix=fix(), source=source, node=node, parts=parts, keywords=words, form=text)

    return find


def with_parts(find: Find, prefix: str, nodes: Callable[[Match], Iterable[ast.expr]]) -> Find:
    """Add nodes to the parts of each match, as `prefix0`, `prefix1`, ..."""

    def found(source: SourceFile) -> Iterator[Match]:
        for match in find(source):
            parts = {f"{prefix}{number}": node for number, node in enumerate(nodes(match))}
            yield replace(match, parts={**match.parts, **parts})

    return found


def applied(text: str, edits: Iterable[TextEdit], start: int, end: int) -> str:
    """Return a span of the text after edits inside it."""
    at, parts = start, []
    for edit in sorted(edits):
        parts += [text[at : edit.start], edit.text]
        at = edit.end
    return "".join([*parts, text[at:end]])


_HOME = "torchtrim.fixes"


def all_fixes() -> tuple[Fix, ...]:
    """Return all fixes of the package by name, except those whose file cannot be imported."""
    fixes, failed = _imported(tuple(import_module(_HOME).__path__))
    for failure in failed:
        note(failure)
    return fixes


@cache
def _imported(folders: tuple[str, ...]) -> tuple[tuple[Fix, ...], tuple[Failure, ...]]:
    fixes: list[Fix] = []
    with collected() as failed:
        for name in sorted(module.name for module in pkgutil.iter_modules(folders)):
            with isolated("fix", name):
                fixes += fixes_of(import_module(f"{_HOME}.{name}"))
    return tuple(sorted(fixes, key=lambda fix: fix.name)), tuple(failed)


def fixes_of(home: ModuleType) -> tuple[Fix, ...]:
    """Return the fixes of a file: its family, or its only one."""
    return home.FIXES if hasattr(home, "FIXES") else (home.FIX,)


def matches(source: SourceFile, codes: Iterable[str] | None = None) -> Iterator[Match]:
    """Yield every match in a source by line, of the fixes for `codes` if given."""
    wanted = None if codes is None else set(codes)
    chosen = [fix for fix in all_fixes() if wanted is None or wanted & set(fix.codes)]
    found = (match for fix in chosen for match in fix.places(source))
    return iter(sorted(found, key=lambda match: match.lines))
