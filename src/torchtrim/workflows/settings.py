"""Waits that a setting ends: the findings with the line of configuration to write."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

from torchtrim.analysis.syncs import CODES
from torchtrim.analysis.user_source import Source as Lines
from torchtrim.errors import UnreadableInput
from torchtrim.records.finding import Finding, Suggestion
from torchtrim.rewriter.advice import Advice, advice_at, advice_for
from torchtrim.source.source import Source, read_source


def with_settings(findings: Iterable[Finding], project: str) -> tuple[Finding, ...]:
    """The findings; those of waits that a setting of a library ends say which, and the line to write."""
    known = _Settings(project)
    return tuple(
        known.settle(one) if one.code in CODES and one.fix and one.fix.kind == "advice" else one
        for one in findings
    )


class _Settings:
    """Reads each user file once."""

    def __init__(self, project: str) -> None:
        self._project = project
        self._lines = Lines(project)
        self._sources: dict[str, Source | None] = {}

    def settle(self, finding: Finding) -> Finding:
        advice = self._advice(finding)
        if advice is None:
            return finding
        fix = Suggestion(kind="config", reason=f"{advice.why}. Write: {advice.line}")
        return msgspec.structs.replace(finding, fix=fix)

    def _advice(self, finding: Finding) -> Advice | None:
        function = self._lines.function(finding.path, finding.line).rpartition(".")[2]
        found = advice_for(finding.path, function)
        source = self._source(finding.path) if found is None else None
        return found if source is None else advice_at(source, finding.line)

    def _source(self, path: str) -> Source | None:
        if path not in self._sources:
            try:
                text, _ = read_source(Path(self._project, path))
                self._sources[path] = Source(path, text)
            except UnreadableInput:
                self._sources[path] = None
        return self._sources[path]
