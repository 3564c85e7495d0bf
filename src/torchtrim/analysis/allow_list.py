"""Findings held against the allow-list: what it covers, what is over, what it no longer needs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass

import msgspec

from torchtrim.analysis.user_source import Source
from torchtrim.records.allow import Allowed, Entry
from torchtrim.records.finding import Finding


@dataclass(frozen=True, kw_only=True)
class Site:
    """A finding, and what an entry knows it by."""

    finding: Finding
    path: str
    function: str
    line_text: str

    @property
    def count(self) -> int:
        """How often a step has it; a finding without a count is there once."""
        return max(self.finding.count_per_step, 1)


@dataclass(frozen=True, kw_only=True)
class AllowOutcome:
    """`allowed`: what each entry covered. `counted`: findings that are left, with what is over only."""

    allowed: tuple[Allowed, ...]
    counted: tuple[Finding, ...]

    @property
    def unneeded(self) -> tuple[Allowed, ...]:
        """Entries that nothing matches any more."""
        return tuple(entry for entry in self.allowed if not entry.used)


def sites(findings: Iterable[Finding], project: str) -> tuple[Site, ...]:
    """Where findings are, as entries say it. Reads the source below `project`."""
    source = Source(project)
    return tuple(
        Site(
            finding=found,
            path=near(found.path, project),
            function=source.function(found.path, found.line),
            line_text=source.line(found.path, found.line),
        )
        for found in findings
    )


def near(path: str, project: str) -> str:
    """`path` relative to the project or to the installed packages, with forward slashes."""
    text = path.replace("\\", "/")
    folder = project.replace("\\", "/").rstrip("/")
    if folder and text.startswith(folder + "/"):
        text = text.removeprefix(folder + "/")
    return text.rpartition("site-packages/")[2]


def hold(entries: Sequence[Entry], found: Sequence[Site], seen: Container[str]) -> AllowOutcome:
    """Take from each finding what the entries allow, those that name a function first.

    Findings on equal lines share the count of their entry, from the first line on. An entry whose
    path is not among those `seen` is another script's, and is left out.
    """
    left = [entry.count for entry in entries]
    covered: dict[int, list[Allowed]] = defaultdict(list)
    over = [site.count for site in found]
    for place in sorted(range(len(found)), key=lambda i: (found[i].path, found[i].finding.line)):
        for index in _matching(entries, found[place]):
            used = min(left[index], over[place])
            left[index] -= used
            over[place] -= used
            if used:
                row = _allowed(entries[index], used, found[place].finding.line)
                covered[index].append(row)
    rows = ((e, covered[i] or [_allowed(e, 0, 0)]) for i, e in enumerate(entries))
    return AllowOutcome(
        allowed=tuple(row for e, some in rows if e.path in seen or some[0].used for row in some),
        counted=tuple(_excess(site, over[i]) for i, site in enumerate(found) if over[i]),
    )


def updated(
    entries: Sequence[Entry],
    found: Sequence[Site],
    seen: Container[str],
    adds: Callable[[Finding], bool],
) -> tuple[Entry, ...]:
    """Entries that allow what was found: those there are with new counts, then the new ones.

    A new one is made for a finding that `adds` takes. One that nothing matches goes, unless it
    has a reason or is another script's.
    """
    counts: dict[int, int] = defaultdict(int)
    fresh: dict[tuple[str, str, str, str], int] = defaultdict(int)
    for site in found:
        matching = _matching(entries, site)
        if matching:
            counts[matching[0]] += site.count
        elif adds(site.finding):
            fresh[site.finding.code, site.path, site.function, site.line_text] += site.count
    kept = (
        msgspec.structs.replace(entry, count=counts.get(i, entry.count))
        for i, entry in enumerate(entries)
        if i in counts or entry.reason or entry.path not in seen
    )
    made = (
        Entry(code=code, path=path, function=function, line_text=text, count=count)
        for (code, path, function, text), count in sorted(fresh.items())
    )
    return (*kept, *made)


def _matching(entries: Sequence[Entry], site: Site) -> list[int]:
    indices = [i for i, entry in enumerate(entries) if _matches(entry, site)]
    return sorted(indices, key=lambda i: not entries[i].function)


def _matches(entry: Entry, site: Site) -> bool:
    where = (entry.code, entry.path, entry.line_text)
    same = where == (site.finding.code, site.path, site.line_text)
    return same and entry.function in ("", site.function)


def _allowed(entry: Entry, used: int, line: int) -> Allowed:
    return Allowed(**msgspec.structs.asdict(entry), used=used, line=line)


def _excess(site: Site, over: int) -> Finding:
    """The finding with the share of its count and prices that is over."""
    found, share = site.finding, over / site.count
    if over == site.count:
        return found
    return msgspec.structs.replace(
        found,
        count_per_step=over,
        price_ms=None if found.price_ms is None else found.price_ms * share,
        price_bytes=None if found.price_bytes is None else int(found.price_bytes * share),
    )
