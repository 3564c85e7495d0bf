"""Locates findings for other tools, relative to a folder and with their allow-list entries; reads source."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePath, PurePosixPath, PureWindowsPath

from torchtrim.analysis.allow_list import near
from torchtrim.errors import UsageError
from torchtrim.records import Finding, Report
from torchtrim.records.files import read_head
from torchtrim.report.facts import price
from torchtrim.report.safe import clean, keep_left
from torchtrim.rules.registry import rule

_INSTALLED = ("site-packages/", "dist-packages/")


@dataclass(frozen=True, kw_only=True)
class LocatedFinding:
    """A finding and its place. `path` is empty outside the folder; `where` always names the place.

    `text` and `advice` are the finding's message and fix, with paths relative to the folder.
    """

    finding: Finding
    text: str
    advice: str
    path: str
    where: str
    line: int
    end_line: int
    allowed: int
    reason: str

    @property
    def covered(self) -> bool:
        """Return True if the allow-list covers every occurrence."""
        return 0 < max(self.finding.count_per_step, 1) <= self.allowed

    @property
    def message(self) -> str:
        """Return the finding in a sentence, with its place if that is outside the folder."""
        named = self.path or not self.where
        return self.text if named else f"{self.text} (in {self.where})"

    @property
    def facts(self) -> str:
        """Return `"12 a step, 74.0 MiB, 2 allowed"`; empty for a finding of the linter."""
        allowed = f"{self.allowed} allowed" if self.allowed else ""
        times = self.finding.count_per_step
        count = f"{times} a step" if times else ""
        return ", ".join(part for part in (count, price(self.finding), allowed) if part)


def locate_findings(report: Report, root: str = "") -> tuple[LocatedFinding, ...]:
    """Locate the report's findings relative to `root`, else to the project, else to the script's folder."""
    folder = str(PurePath(report.script).parent) if _is_absolute(report.script) else ""
    base = root or report.project or folder
    used: Counter[tuple[str, str, int]] = Counter()
    reasons: dict[tuple[str, str, int], str] = {}
    for entry in report.allowed:
        key = entry.code, entry.path, entry.line
        used[key] += entry.used
        reasons[key] = reasons.get(key) or clean(entry.reason)
    return tuple(_locate(report, found, base, used, reasons) for found in report.findings)


def _locate(
    report: Report,
    found: Finding,
    base: str,
    used: Counter[tuple[str, str, int]],
    reasons: dict[tuple[str, str, int], str],
) -> LocatedFinding:
    key = found.code, near(found.path, report.project), found.line
    path, line = inside(found.path, base), max(found.line, 0)
    return LocatedFinding(
        finding=found,
        text=_without(base, found.message),
        advice=_without(base, found.fix.reason) if found.fix else "",
        path=path,
        where=_named(path or near(found.path, base), line),
        line=line,
        end_line=max(found.end_line, line),
        allowed=used[key],
        reason=reasons.get(key, ""),
    )


def inside(path: str, base: str) -> str:
    """Return `path` relative to `base`, on one line, with forward slashes; empty if it is outside."""
    text = path.replace("\\", "/")
    folder = base.replace("\\", "/").rstrip("/")
    if folder and text.startswith(folder + "/"):
        text = text.removeprefix(folder + "/")
    elif _is_absolute(path):
        return ""
    outside = any(name in text for name in _INSTALLED) or ".." in PurePosixPath(text).parts
    return "" if outside else clean(text)


def _without(base: str, text: str) -> str:
    folder = base.rstrip("/\\")
    return clean(text.replace(folder + "/", "") if folder else text)


def _is_absolute(path: str) -> bool:
    return PurePosixPath(path).is_absolute() or PureWindowsPath(path).is_absolute()


def _named(path: str, line: int) -> str:
    text = clean(path)
    short = text.rpartition("/")[2] if _is_absolute(path) else text
    return f"{short}:{line}" if short and line else short


def rule_name(code: str) -> str:
    """Return the rule's name, or an empty string for a code that this torchtrim does not know."""
    try:
        return rule(code).name
    except UsageError:
        return ""


_AROUND = 2  # Arbitrary; enough to recognize the place.
_MOST_LINES = 12  # Arbitrary; a finding on a long statement stays short.
_MOST_BYTES = 2**20  # Arbitrary; bounds what a hostile file makes us read.
_MOST_CHARACTERS = 160  # Arbitrary; longer lines do not fit the page.


@dataclass(frozen=True, kw_only=True)
class SourceLine:
    """A source line; `hot` marks the lines of the finding."""

    number: int
    text: str
    hot: bool


def excerpt(
    path: str, line: int, end_line: int, folders: Iterable[Path] = ()
) -> tuple[SourceLine, ...]:
    """Return lines `line` to `end_line` and two on each side; empty if the file cannot be read."""
    if line < 1:
        return ()
    first = max(line - _AROUND, 1)
    last = min(max(end_line, line) + _AROUND, first + _MOST_LINES - 1)
    lines = _lines(path, folders)
    shown = (
        (number, keep_left(clean(lines[number - 1].expandtabs(4).rstrip()), _MOST_CHARACTERS))
        for number in range(first, min(last, len(lines)) + 1)
    )
    return tuple(SourceLine(number=n, text=text, hot=line <= n <= end_line) for n, text in shown)


def _lines(path: str, folders: Iterable[Path]) -> list[str]:
    for candidate in (Path(path), *(folder / path for folder in folders)):
        try:
            if candidate.suffix == ".py" and candidate.is_file():
                return read_head(candidate, _MOST_BYTES).decode(errors="replace").split("\n")
        except (OSError, ValueError):
            continue
    return []
