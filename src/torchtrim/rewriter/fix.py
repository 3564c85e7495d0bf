"""What a fix is, what it matches, and what it writes."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from torchtrim.core.isolation import isolated
from torchtrim.records.seen import Probe
from torchtrim.source.branches import is_fallback
from torchtrim.source.facts import Facts, Refused
from torchtrim.source.forms import places
from torchtrim.source.source import Source, spot

Equivalence = Literal["BITWISE", "ROUNDING"]


class Edit(NamedTuple):
    """A span of the text, and what comes in its place."""

    start: int
    end: int
    text: str


@dataclass(frozen=True, kw_only=True)
class Match:
    """A place in the source that a fix is for.

    `node` is what would be written anew, `parts` the expressions it is made of, by name; `watched`
    are those whose values the fix wants to know. `keywords` are what `**REST` of the form took, and
    `form` is the form that fitted. `begin` is where the lines with the sync begin, if before the node.
    `syncs`: the nodes of which one has to be the sync, where others in the node are not fixed with it.
    """

    fix: Fix
    source: Source
    node: ast.AST
    parts: Mapping[str, ast.expr]
    keywords: Mapping[str, list[ast.keyword]] = field(default_factory=dict)
    form: str = ""
    begin: ast.AST | None = None
    syncs: tuple[ast.AST, ...] = ()

    @property
    def lines(self) -> tuple[int, int]:
        """First and last line of the statement's own code, without the body that it heads."""
        statement = self.source.statement(self.node)
        if self.begin is not None:
            return self.begin.lineno, self.node.end_lineno  # type: ignore[attr-defined]
        if self.node is not statement or not hasattr(statement, "body"):
            return self.node.lineno, self.node.end_lineno or self.node.lineno  # type: ignore[attr-defined]
        return statement.lineno, statement.end_lineno or statement.lineno

    def text(self, part: str) -> str:
        """The source of a part."""
        return self.source.segment(self.parts[part])

    def probe(self, number: int) -> Probe:
        """What to watch for the facts that the fix needs."""
        return Probe(
            number=number,
            path=self.source.path,
            parts={
                name: spot(node)
                for name, node in self.parts.items()
                if not isinstance(node, ast.Slice | ast.Starred)
            },
        )


@dataclass(frozen=True, kw_only=True)
class Rewrite:
    """What a fix writes at one match, ready to be applied.

    `equivalence` is what the certificate may say at most. `open_needs` are facts that it rests on and
    nobody has seen; `risk` says what may differ even so. Only with neither is it safe.
    """

    match: Match
    edits: tuple[Edit, ...]
    equivalence: Equivalence
    open_needs: tuple[str, ...] = ()
    risk: str = ""

    @property
    def safe(self) -> bool:
        """Whether it may be applied without being asked for."""
        return not self.open_needs and not self.risk


class Writing(NamedTuple):
    """What a fix writes: its edits, and what may differ even where all its needs are met."""

    edits: tuple[Edit, ...]
    risk: str = ""
    equivalence: Equivalence | None = None


@dataclass(frozen=True, kw_only=True)
class Fix:
    """A way to write a place of the source without a host-device sync.

    `codes` are the rules whose findings it fixes. `find` gives the places that have its form. `write`
    says what to write there, by the facts; it asks `facts.need` for what it rests on, and raises
    `Refused` where the fix would change the result. `doc` is its documentation: a line of summary,
    then what must hold, why, and when it refuses. A fix that has its file to itself has its `name`
    and `doc` from there.
    """

    codes: tuple[str, ...]
    equivalence: Equivalence
    find: Callable[[Source], Iterator[Match]]
    write: Callable[[Match, Facts], Writing]
    name: str = ""
    doc: str = ""

    def __post_init__(self) -> None:
        """Take the name and the documentation of the file where none are given."""
        home = self.write.__module__
        object.__setattr__(self, "name", self.name or home.rpartition(".")[2])
        doc = self.doc or sys.modules[home].__doc__ or ""
        object.__setattr__(self, "doc", inspect.cleandoc(doc))

    def places(self, source: Source) -> tuple[Match, ...]:
        """What `find` gives of a source, in which it looks once, without what a guard keeps as it was."""
        if self.name not in source.memo:
            found: list[Match] = []
            with isolated("fix", self.name):
                found += (one for one in self.find(source) if not is_fallback(source, one.node))
            source.memo[self.name] = tuple(found)
        return source.memo[self.name]

    @property
    def summary(self) -> str:
        """What it does, in a sentence."""
        return self.doc.partition("\n\n")[0].replace("\n", " ")

    def rewrite(self, match: Match, facts: Facts) -> Rewrite:
        """The rewrite of one place. Raises `Refused` with the reason where there is none."""
        written: Writing | None = None
        with isolated("fix", self.name, passes=(Refused,)):
            written = self.write(match, facts)
        if written is None:
            raise Refused("it failed, which is a bug of torchtrim. Write this place by hand.")
        return Rewrite(
            match=match,
            edits=written.edits,
            equivalence=written.equivalence or self.equivalence,
            open_needs=tuple(facts.missing),
            risk=written.risk,
        )


def of_forms(fix: Callable[[], Fix], *forms: str) -> Callable[[Source], Iterator[Match]]:
    """A `find` that gives each place of one of the forms, the first form first."""

    def find(source: Source) -> Iterator[Match]:
        for node, text, bound in places(forms, source):
            yield Match(
                fix=fix(),
                source=source,
                node=node,
                parts=bound.parts,
                keywords=bound.keywords,
                form=text,
            )

    return find
