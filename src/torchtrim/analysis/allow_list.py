"""Compares findings with the allow-list and with `# torchtrim: ignore[TT101]` comments."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass

import msgspec

from torchtrim.analysis.user_source import SourceLines, text_of
from torchtrim.records.allow import AllowedFinding, Entry
from torchtrim.records.finding import Finding


@dataclass(frozen=True, kw_only=True)
class Site:
    """A finding, with the fields that an entry must match."""

    finding: Finding
    path: str
    function: str
    line_text: str

    @property
    def count(self) -> int:
        """Times per step; a finding without a count counts once."""
        return max(self.finding.count_per_step, 1)


@dataclass(frozen=True, kw_only=True)
class AllowOutcome:
    """`allowed`: the entries and their use. `counted`: the remaining findings, reduced to the excess."""

    allowed: tuple[AllowedFinding, ...]
    counted: tuple[Finding, ...]


def sites(findings: Iterable[Finding], project: str) -> tuple[Site, ...]:
    """Return the sites of findings as entries describe them. Reads the source below `project`."""
    source = SourceLines(project)
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
    """Return `path` relative to the project or to the installed packages, with forward slashes."""
    text = path.replace("\\", "/")
    folder = project.replace("\\", "/").rstrip("/")
    if folder and text.startswith(folder + "/"):
        text = text.removeprefix(folder + "/")
    return text.rpartition("site-packages/")[2]


def hold(entries: Sequence[Entry], found: Sequence[Site], seen: Container[str]) -> AllowOutcome:
    """Subtract the allowed counts from the findings. Entries that name a function apply first.

    Findings on equal lines share their entry's count, starting from the first line. Entries whose path is
    not in `seen` belong to another script and are left out.
    """
    left = [entry.count for entry in entries]
    covered: dict[int, list[AllowedFinding]] = defaultdict(list)
    over = [site.count for site in found]
    for place in sorted(range(len(found)), key=lambda i: (found[i].path, found[i].finding.line)):
        for index in _matching(entries, found[place]):
            used = min(left[index], over[place])
            left[index] -= used
            over[place] -= used
            if used:
                covered[index].append(_allowed(entries[index], used, found[place].finding.line))
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
    """Return entries that allow the findings: present ones with new counts, then new ones.

    `adds` selects the findings that get a new entry. An entry without a match is removed, unless it has a
    reason or belongs to another script.
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
    """Return the indices of matching entries, those that name a function first."""
    wanted = (site.finding.code, site.path, site.line_text)
    indices = (
        index
        for index, entry in enumerate(entries)
        if (entry.code, entry.path, entry.line_text) == wanted
        and entry.function in ("", site.function)
    )
    return sorted(indices, key=lambda index: not entries[index].function)


def _allowed(entry: Entry, used: int, line: int) -> AllowedFinding:
    return AllowedFinding(**msgspec.structs.asdict(entry), used=used, line=line)


def _excess(site: Site, over: int) -> Finding:
    """Return the finding with its count and prices reduced to the excess."""
    found, share = site.finding, over / site.count
    if over == site.count:
        return found
    return msgspec.structs.replace(
        found,
        count_per_step=over,
        price_ms=None if found.price_ms is None else found.price_ms * share,
        price_bytes=None if found.price_bytes is None else int(found.price_bytes * share),
    )


_COMMENT = re.compile(r"#\s*torchtrim:\s*ignore\[([A-Z0-9,\s]*)\]", re.IGNORECASE)


class Ignores:
    """The findings that comments in the source ignore. Each file is read once, up to 4 MiB of it.

    Relative paths start at the project's folder. A missing file ignores nothing.
    """

    def __init__(self, project: str) -> None:
        self._project = project
        self._codes: dict[str, dict[int, frozenset[str]]] = {}

    def cover(self, finding: Finding) -> bool:
        """Return True if a line of the finding has a comment with its code."""
        if finding.line <= 0:
            return False
        if finding.path not in self._codes:
            self._codes[finding.path] = ignored_codes(text_of(self._project, finding.path))
        last = max(finding.line, finding.end_line)
        return any(
            finding.line <= line <= last and finding.code in codes
            for line, codes in self._codes[finding.path].items()
        )


def ignored_codes(text: str) -> dict[int, frozenset[str]]:
    """Return the codes that each line of a source ignores, by line number."""
    return {
        number: frozenset(match[1].upper().replace(",", " ").split())
        for number, line in enumerate(text.splitlines(), start=1)
        if (match := _COMMENT.search(line))
    }
