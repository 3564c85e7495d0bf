"""Findings as machines place them: relative to a folder, with what the allow-list covers."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import PurePath, PurePosixPath, PureWindowsPath

from torchtrim.analysis.allow_list import near
from torchtrim.errors import UsageError
from torchtrim.records import Finding, Report
from torchtrim.report.facts import price
from torchtrim.report.safe import clean
from torchtrim.rules.registry import rule

_INSTALLED = ("site-packages/", "dist-packages/")


@dataclass(frozen=True, kw_only=True)
class Located:
    """A finding and its place. `path` is `""` where it is outside; `where` names it in any case.

    `text` and `advice` are the finding's message and fix, without the folder that paths begin with.
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
        """Whether the allow-list covers all of it."""
        return 0 < max(self.finding.count_per_step, 1) <= self.allowed

    @property
    def message(self) -> str:
        """The finding in a sentence, with its place where it is outside."""
        named = self.path or not self.where
        return self.text if named else f"{self.text} (in {self.where})"

    @property
    def facts(self) -> str:
        """`"12 a step, 74.0 MiB, 2 allowed"`; empty for what was found in the source alone."""
        allowed = f"{self.allowed} allowed" if self.allowed else ""
        times = self.finding.count_per_step
        count = f"{times} a step" if times else ""
        return ", ".join(part for part in (count, price(self.finding), allowed) if part)


def located(report: Report, root: str = "") -> tuple[Located, ...]:
    """The report's findings, relative to `root`, else to the project, else to the script's folder."""
    base = root or report.project or _folder_of(report.script)
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
) -> Located:
    key = found.code, near(found.path, report.project), found.line
    path, line = inside(found.path, base), max(found.line, 0)
    return Located(
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
    """`path` relative to `base`, on one line, with forward slashes; `""` where it is outside."""
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


def _folder_of(script: str) -> str:
    return str(PurePath(script).parent) if _is_absolute(script) else ""


def _named(path: str, line: int) -> str:
    """`path:line`; of a path that is not relative, the file's name only."""
    text = clean(path)
    short = text.rpartition("/")[2] if _is_absolute(path) else text
    return f"{short}:{line}" if short and line else short


def rule_name(code: str) -> str:
    """The rule's name; `""` for a code that this torchtrim does not know."""
    try:
        return rule(code).name
    except UsageError:
        return ""
