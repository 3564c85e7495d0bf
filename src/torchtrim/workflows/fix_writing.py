"""Writes a fix by what a run showed, and tries the whole function on the other kinds of input it accepts."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from torchtrim.certify.kinds import KindsTried, try_kinds
from torchtrim.core.units import counted
from torchtrim.records.probes import ObservedValue, Probe, ProbeResult
from torchtrim.rewriter.edits import patch
from torchtrim.rewriter.fix import Match, Rewrite
from torchtrim.source.alone import alone, named
from torchtrim.source.facts import Facts
from torchtrim.source.source import SourceFile, spot


class Observation(NamedTuple):
    """The values that a run showed of a match's parts, and of the inputs of the function around it."""

    parts: ProbeResult
    inputs: ProbeResult


class WrittenFix(NamedTuple):
    """A rewrite, and what shows that it holds for kinds of input that the run did not show."""

    rewrite: Rewrite
    kinds: str


def probes_of(match: Match, number: int) -> tuple[Probe, Probe]:
    """Return the probes of a match's parts and of its function's inputs, numbered from `number`."""
    function = alone(match.source, match.node)
    inputs = function.inputs if function else {}
    places = {
        f"{name} {use}": spot(node)
        for name, nodes in inputs.items()
        for use, node in enumerate(nodes)
    }
    return match.probe(number), Probe(number=number + 1, path=match.source.path, parts=places)


def written(match: Match, seen: Observation) -> WrittenFix:
    """Return the rewrite of a match. Raises `FixRefused`.

    It is not safe if the function that it is in differs on a kind of input that the original accepts. If
    that function cannot run alone, it holds for the kinds of the run.
    """
    rewrite = match.fix.rewrite(match, Facts(seen.parts))
    if rewrite.advice:
        return WrittenFix(rewrite, "")
    tried = kinds_of(rewrite, seen.inputs)
    if tried is None:
        return WrittenFix(rewrite, "holds for the kinds of input of the run")
    accepted = f"{tried.accepted} of {counted(tried.tried, 'kind')} of input"
    if tried.differs:
        risk = f"it changes the result for {tried.differs}: assert that this cannot be"
        return WrittenFix(replace(rewrite, risk=rewrite.risk or risk), "")
    if not tried.complete:
        return WrittenFix(rewrite, f"equal on {accepted}; the time was too short for others")
    return WrittenFix(rewrite, f"equal on {accepted}, all that the original accepts")


def kinds_of(rewrite: Rewrite, inputs: ProbeResult) -> KindsTried | None:
    """Try the function around a rewrite on other kinds of input; None if it cannot run alone."""
    source, node = rewrite.match.source, rewrite.match.node
    before = alone(source, node)
    if before is None:
        return None
    after = named(SourceFile(source.path, patch(source, [rewrite]).text), before)
    exact = rewrite.equivalence == "BITWISE"
    tried = try_kinds(before, after, _inputs_of(inputs), exact=exact) if after is not None else None
    return tried if tried is not None and tried.accepted else None


def _inputs_of(seen: ProbeResult) -> list[dict[str, ObservedValue]]:
    """Return the inputs of each execution by name; what one did not read is as in another."""
    shown = [
        {part.partition(" ")[0]: value for part, value in reversed(one.values.items())}
        for one in seen.executions
    ]
    every = {name: value for one in reversed(shown) for name, value in one.items()}
    return [every | one for one in shown]
