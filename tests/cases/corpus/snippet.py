"""A piece of user code, how often it waits for a CUDA device, and the public source that says so."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch

from torchtrim.syncs.base import Citation

Body = Callable[[], object]
Setup = Callable[[], Body]


@dataclass(frozen=True, kw_only=True)
class Thread:
    """A public thread that counted, or that removed the wait and saw it gone."""

    repository: str
    number: int
    note: str

    @property
    def url(self) -> str:
        """Where to read it."""
        return f"https://github.com/{self.repository}/issues/{self.number}"


Label = Citation | Thread


@dataclass(frozen=True, kw_only=True)
class Since:
    """From this version of torch on it waits `waits` times, and why."""

    version: str
    waits: int
    evidence: Label


@dataclass(frozen=True, kw_only=True)
class Snippet:
    """`setup` makes what is there before, and returns the body, which waits `waits` times with the torch
    that is here, and `waits_before` times with torch 2.13.

    Where `exact` is False it waits at least so often. `repairs` names the snippet that this one is the
    repaired form of. The labels stand in `evidence`, whatever a tool says.
    """

    name: str
    family: str
    setup: Setup
    waits: int
    waits_before: int
    evidence: tuple[Label, ...]
    exact: bool
    repairs: str


SNIPPETS: dict[str, Snippet] = {}


def snippet(
    waits: int,
    *evidence: Label,
    exact: bool = True,
    repairs: Snippet | None = None,
    since: Since | None = None,
) -> Callable[[Setup], Snippet]:
    """Enter a function into the corpus: it prepares, and returns the body."""

    def enter(setup: Setup) -> Snippet:
        name = setup.__name__
        assert name not in SNIPPETS, name
        changed = since is not None and _version(since.version) <= _version(torch.__version__)
        found = Snippet(
            name=name,
            family=setup.__module__.rpartition(".")[2],
            setup=setup,
            waits=since.waits if since is not None and changed else waits,
            waits_before=waits,
            evidence=(*evidence, since.evidence) if since is not None else evidence,
            exact=exact,
            repairs=repairs.name if repairs else "",
        )
        SNIPPETS[name] = found
        return found

    return enter


def _version(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:2]))
