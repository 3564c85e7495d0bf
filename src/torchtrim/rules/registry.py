"""Finds the rules and runs them. To add one, add a file `ttNNN_*.py` that defines `RULE`."""

from __future__ import annotations

import pkgutil
import re
from collections.abc import Iterable, Sequence
from functools import cache
from importlib import import_module

from msgspec.structs import replace

from torchtrim import rules
from torchtrim.analysis.allow_list import Ignores
from torchtrim.analysis.prices import memory_share, time_share
from torchtrim.core.isolation import Failure, collected, isolated, note
from torchtrim.core.words import did_you_mean
from torchtrim.errors import UsageError
from torchtrim.records.files import without_collection
from torchtrim.records.finding import Finding
from torchtrim.records.profile import Profile
from torchtrim.rules.base import Rule

_STEM = re.compile(r"tt\d{3}_\w+")


def all_rules() -> tuple[Rule, ...]:
    """Return every rule of the package by code, except those whose file fails to import."""
    found, failed = _imported(tuple(rules.__path__))
    for one in failed:
        note(one)
    return found


@cache
def _imported(_: tuple[str, ...]) -> tuple[tuple[Rule, ...], tuple[Failure, ...]]:
    """Return the rules in these folders, and the failures of others."""
    names = (found.name for found in pkgutil.iter_modules(rules.__path__))
    found: list[Rule] = []
    with collected() as failed:
        for name in filter(_STEM.fullmatch, names):
            with isolated("rule", name.partition("_")[0].upper()):
                found.append(import_module(f"{rules.__name__}.{name}").RULE)
    return tuple(sorted(found, key=lambda one: one.code)), tuple(failed)


def rule(code: str) -> Rule:
    """Return the rule with a code, such as `"TT101"`, or a name, such as `"value-read-on-host"`.

    Raises `UsageError` with the nearest codes if there is none.
    """
    for found in all_rules():
        if code.upper() == found.code or code.lower() == found.name:
            return found
    raise UsageError(f"unknown rule {code!r}. {_nearest(code)}")


def diagnose(
    profile: Profile, select: Iterable[str] | None = None, *, alone: bool = True
) -> tuple[Finding, ...]:
    """Return the findings of all rules, or of those selected, most expensive first.

    `select` takes codes and prefixes: `"TT101"`, `"TT2"`. The most expensive finding has the largest share
    of the step's time or of its peak. Findings on lines with `# torchtrim: ignore[TT101]` for their code are
    left out. Unless `alone`, rules that compare ranks (`diagnose_ranks`) are left out too.
    """
    ignores = Ignores(profile.project)
    with without_collection():
        rules_ = [r for r in _selected(select) if alone or r.across is None]
        found = [f for r in rules_ for f in _checked(r, profile) if not ignores.cover(f)]
    return in_order(profile, found)


def _checked(one: Rule, *profiles: Profile) -> list[Finding]:
    """Run a rule on a profile or, if it compares ranks, across all. A rule that fails has no findings."""
    found: list[Finding] = []
    with isolated("rule", one.code):
        if one.across is not None:
            found += one.across(profiles)
        elif one.check is not None:
            found += one.check(profiles[0])
    return found


def diagnose_ranks(profiles: Sequence[Profile]) -> tuple[Finding, ...]:
    """Return the findings of several ranks beyond the first one's own, most expensive first.

    These are findings of other ranks, which name the rank, and findings that need all ranks together.
    """
    lead, ignores = profiles[0], Ignores(profiles[0].project)
    with without_collection():
        single = [one for one in _selected(None) if one.across is None]
        known = {_place(f) for one in single for f in _checked(one, lead)}
        found = []
        for other in profiles[1:]:
            for f in (f for one in single for f in _checked(one, other)):
                if _place(f) not in known:
                    known.add(_place(f))
                    found.append(replace(f, message=f"on rank {other.rank}: {f.message}"))
        several = (one for one in _selected(None) if one.across is not None)
        found += [f for one in several for f in _checked(one, *profiles)]
    return in_order(lead, (f for f in found if not ignores.cover(f)))


def in_order(profile: Profile, findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Sort findings, most expensive first."""
    return tuple(sorted(findings, key=lambda finding: _order(profile, finding)))


def _place(finding: Finding) -> tuple[str, str, int]:
    return finding.code, finding.path, finding.line


def explain(code: str) -> str:
    """Return the rule's page in Markdown. Raises `UsageError` for an unknown code."""
    found = rule(code)
    return f"# {found.code} {found.name}\n\n{found.page}\n"


def _selected(select: Iterable[str] | None) -> tuple[Rule, ...]:
    if select is None:
        return tuple(one for one in all_rules() if not one.on_request)
    starts = tuple(select)
    for start in starts:
        if not any(_matches(found, start) for found in all_rules()):
            raise UsageError(f"no rule's code starts with {start!r}. {_nearest(start)}")
    return tuple(r for r in all_rules() if any(_matches(r, start) for start in starts))


def _matches(found: Rule, start: str) -> bool:
    return bool(start) and found.code.startswith(start.upper())


def _nearest(code: str) -> str:
    known = [name for found in all_rules() for name in (found.code, found.name)]
    codes = ", ".join(found.code for found in all_rules())
    return did_you_mean(code, known).strip() or f"Known are {codes}."


def _order(profile: Profile, finding: Finding) -> tuple[float, int, str, str, int]:
    dearest = -max(time_share(profile, finding), memory_share(profile, finding))
    return dearest, -finding.count_per_step, finding.code, finding.path, finding.line
