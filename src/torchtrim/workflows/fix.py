"""Fixes of a script's host-device syncs, and their part of a report."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from msgspec.structs import replace

from torchtrim.analysis.syncs import CODES
from torchtrim.certify.certify import certify
from torchtrim.certify.contest import Contest
from torchtrim.errors import UnreadableInput
from torchtrim.records.certificate import Certificate
from torchtrim.records.finding import Finding, Suggestion
from torchtrim.records.fix import Fixes, FixRecord, State
from torchtrim.records.profile import Profile
from torchtrim.records.report import Report, Result
from torchtrim.records.trial import Request, Trial
from torchtrim.report.assemble import with_planned
from torchtrim.rewriter.edits import compatible, diff_of, line_before, patch
from torchtrim.rewriter.files import write_sources
from torchtrim.rewriter.fix import Match, Rewrite, matches
from torchtrim.runner.script import Script
from torchtrim.runner.trials import Progress, run_once
from torchtrim.source.facts import FixRefused
from torchtrim.source.source import SourceFile, read_source
from torchtrim.workflows.findings import report_of
from torchtrim.workflows.fix_attempt import (
    Attempt,
    Waits,
    attempt,
    costs_more,
    grown_ms,
    profile_of,
    waiting_lines,
    waits_of,
)
from torchtrim.workflows.fix_writing import Observation, probes_of, written
from torchtrim.workflows.lint import settle

_RANK = {"applied": 0, "suggested": 1, "refused": 2, "reverted": 3}


def fix_report(
    script: Script,
    request: Request,
    *,
    unsafe: bool = False,
    write: bool = False,
    ready: Callable[[str], object] = lambda _: None,
    progress: Progress = lambda _: None,
) -> Result:
    """Fix the host-device syncs in a script's own source, with a proof of each fix.

    `write`: write the files, after `ready` has got the diff. `unsafe`: also apply fixes whose assumptions no
    run has shown.
    """
    settle(script.path or Path.cwd())
    fixed = Fixing(script, request, progress, unsafe=unsafe).fix()
    fixes = fixes_of(fixed, script.project, written=write and bool(fixed.texts))
    if fixes.written:
        ready(fixes.diff)
        write_sources(fixed.texts, fixed.before, script.project)
    report = report_of("optimize", script, fixed.original)
    report = with_planned(report, fixed.planned, fixes.certificate)
    after = fixed.planned.profile if fixed.planned else None
    return Result(with_fixes(report, fixes), fixed.original.profile, after)


def fixes_of(fixed: Fixed, project: Path, *, written: bool = False) -> Fixes:
    """Return the report's fixes, with the diff of all that were applied."""
    diff = "".join(
        diff_of(_relative(path, project), fixed.before[path], text)
        for path, text in sorted(fixed.texts.items())
    )
    # Another fix has freed these lines of their syncs, which makes a refusal there moot.
    freed = {
        (one.path, one.line)
        for one in fixed.records
        if one.state == "applied" and not one.syncs_after
    }
    return Fixes(
        places=tuple(
            one
            for one in fixed.records
            if one.state != "refused" or (one.path, one.line) not in freed
        ),
        syncs_before=_waits(fixed.original, project),
        syncs_after=_waits(fixed.planned or fixed.original, project),
        diff=diff,
        written=written,
        certificate=fixed.certificate,
    )


def with_fixes(report: Report, fixes: Fixes) -> Report:
    """Add the fixes to the report, and the state of each to its finding."""
    by_line: dict[tuple[str, int], list[FixRecord]] = {}
    for record in sorted(fixes.places, key=lambda one: _RANK[one.state]):
        by_line.setdefault((record.path, record.line), []).append(record)
    findings = tuple(
        _with_fix(finding, by_line.get((finding.path, finding.line), []))
        for finding in report.findings
    )
    return replace(report, findings=findings, fixes=fixes)


def _with_fix(finding: Finding, records: list[FixRecord]) -> Finding:
    if not records or finding.code not in CODES:
        return finding
    first = records[0]
    reason = f"{first.name}: {first.reason}" if first.reason else first.name
    fix = Suggestion(
        kind="code" if first.state in ("applied", "suggested") else "refused",
        equivalence=first.equivalence,
        diff=first.diff or None,
        reason=reason if first.state != "suggested" else f"unsafe, {reason}",
    )
    return replace(finding, fix=fix)


def _waits(trial: Trial, project: Path) -> int:
    return sum(waiting_lines(trial.profile, project).values()) if trial.profile else 0


def _relative(path: str, project: Path) -> str:
    return str(Path(path).relative_to(project)) if Path(path).is_relative_to(project) else path


_MOST_ROUNDS = 20  # against endless rounds: each fix uncovers at most a few further syncs
Key = tuple[str, str, str]
"""A fix's name, its file, and the text of its expression."""
Place = tuple[str, str, str, int, int]
"""A key with the first and last line."""


@dataclass
class Fixed:
    """Result of fixing: the new texts by absolute path, the record of each fix, and the certificate.

    `grown`: for each applied fix, the number of its record, and the ms it keeps the device longer.
    """

    original: Trial
    texts: dict[str, str] = field(default_factory=dict)
    before: dict[str, str] = field(default_factory=dict)
    records: list[FixRecord] = field(default_factory=list)
    certificate: Certificate | None = None
    planned: Trial | None = None
    grown: dict[Key, tuple[int, float]] = field(default_factory=dict)


class Fixing:
    """Fixing of one script, which runs with new texts in place of its files.

    `unsafe`: also apply fixes whose assumptions no run has shown, or that may differ otherwise.
    """

    def __init__(
        self, script: Script, request: Request, progress: Progress, *, unsafe: bool = False
    ) -> None:
        self._script = script
        self._request = request
        self._progress = progress
        self._unsafe = unsafe
        self._done: set[Key] = set()
        self._left_out: set[Key] = set()
        self._too_slow: list[FixRecord] = []
        self._looked: dict[Place, Observation] = {}
        self._kinds: dict[Key, str] = {}
        self._step_by_step = False

    def fix(self, original: Trial | None = None) -> Fixed:
        """Fix until no more fixes are found, and all fixes together pay off.

        Each fix can uncover the next sync, so the costs are compared at the end. If the fixes cost more than
        the syncs, begin again without the fix that keeps the device longest. The certificate covers all
        fixes together; if it is NOT EQUAL, begin again with a certificate for each round.
        """
        original = original or self._run({}, "original")
        while True:
            fixed = self._rounds(original)
            slowest = self._slowest(fixed)
            if slowest is not None:
                self._left_out.add(slowest)
            elif self._proved(fixed):
                fixed.records += self._too_slow
                return fixed
            self._done = set(self._left_out)

    def _proved(self, fixed: Fixed) -> bool:
        """Certify all fixes together, if not done; return False to certify them round by round."""
        if fixed.planned is None or fixed.certificate is not None:
            return True
        fixed.certificate = self._certify(fixed, fixed.planned, fixed.texts)
        self._step_by_step = fixed.certificate.verdict == "NOT EQUAL"
        return not self._step_by_step

    def _rounds(self, original: Trial) -> Fixed:
        fixed, trial = Fixed(original), original
        for number in range(_MOST_ROUNDS):
            if trial.profile is None:
                break
            rewrites = self._propose(fixed, trial.profile)
            if not rewrites:
                break
            trial = self._settle(fixed, trial, rewrites, f"fixes, round {number + 1}") or trial
        return fixed

    def _slowest(self, fixed: Fixed) -> Key | None:
        if fixed.planned is None or not fixed.grown:
            return None
        reason = costs_more(profile_of(fixed.planned), profile_of(fixed.original))
        key, (number, grown) = max(fixed.grown.items(), key=lambda item: item[1][1])
        if not reason:
            return None
        record = fixed.records[number]
        why = f"its dense form keeps the device {grown:.3g} ms longer, more than the syncs cost: {reason}"
        self._too_slow.append(replace(record, state="reverted", reason=why))
        return key

    def _propose(self, fixed: Fixed, profile: Profile) -> list[Rewrite]:
        """Return the rewrites of syncs in a profile to try next, and note those not to apply."""
        waits = waiting_lines(profile, self._script.project)
        new = [
            match
            for path in sorted({path for path, _ in waits})
            for match in self._matches(fixed, path)
            if waits_of(match, waits) and self._key(match) not in self._done
        ]
        observed = self._observe(fixed, new) if new else ()
        return compatible(
            rewrite
            for match, seen in zip(new, observed, strict=True)
            if (rewrite := self._judge(fixed, match, seen, waits)) is not None
        )

    def _judge(self, fixed: Fixed, match: Match, seen: Observation, waits: Waits) -> Rewrite | None:
        try:
            rewrite, self._kinds[self._key(match)] = written(match, seen)
            if not rewrite.advice and (rewrite.safe or self._unsafe):
                return rewrite
            diff = self._diff(match.source, rewrite)
        except FixRefused as error:
            self._note(fixed, match, "refused", waits, reason=str(error))
            return None
        if rewrite.advice:
            self._note(fixed, match, "refused", waits, reason=rewrite.advice, diff=diff)
            return None
        reason = rewrite.risk or f"no run has shown that {' and that '.join(rewrite.open_needs)}"
        self._note(fixed, match, "suggested", waits, reason=reason, diff=diff)
        return None

    def _matches(self, fixed: Fixed, path: str) -> list[Match]:
        try:
            if path not in fixed.before:
                fixed.before[path] = read_source(Path(path))[0]
            return list(matches(SourceFile(path, fixed.texts.get(path, fixed.before[path]))))
        except UnreadableInput:
            return []

    def _observe(self, fixed: Fixed, found: Sequence[Match]) -> tuple[Observation, ...]:
        """Return the observed values of the matches' expressions, remembered for the original."""
        if fixed.texts:
            return self._look(fixed, found)
        new = [match for match in found if self._place(match) not in self._looked]
        if new:
            self._looked |= zip(map(self._place, new), self._look(fixed, new), strict=True)
        return tuple(self._looked[self._place(match)] for match in found)

    def _look(self, fixed: Fixed, found: Sequence[Match]) -> tuple[Observation, ...]:
        pairs = (probes_of(match, 2 * number) for number, match in enumerate(found))
        probes = tuple(probe for pair in pairs for probe in pair)
        request = replace(self._request, texts=fixed.texts, probes=probes, measured=False)
        seen = run_once(self._script, request, "looking at values", self._progress).observed
        return tuple(map(Observation, seen[::2], seen[1::2]))

    def _settle(
        self, fixed: Fixed, trial: Trial, rewrites: Sequence[Rewrite], what: str
    ) -> Trial | None:
        """Apply all rewrites together, or the first that works; return the trial, None if all fail."""
        together = self._try(fixed, trial, rewrites, what)
        if not together.wrong:
            return self._keep(fixed, trial, together)
        for rewrite in rewrites:
            alone = together
            if len(rewrites) > 1:
                alone = self._try(fixed, trial, [rewrite], f"{what}, {rewrite.match.fix.name}")
            if not alone.wrong:
                return self._keep(fixed, trial, alone)
            self._revert(fixed, trial, alone)
        return None

    def _try(self, fixed: Fixed, trial: Trial, rewrites: Sequence[Rewrite], what: str) -> Attempt:
        before, project = profile_of(trial), self._script.project

        def run(texts: dict[str, str]) -> Trial:
            return self._run(texts, what)

        tried = attempt(rewrites, fixed.texts, before, project, run)
        if tried.wrong or tried.trial is None or not self._step_by_step:
            return tried
        certificate = self._certify(fixed, tried.trial, tried.texts)
        unequal = certificate.verdict == "NOT EQUAL"
        return tried._replace(certificate=certificate, wrong=certificate.reason if unequal else "")

    def _certify(self, fixed: Fixed, after: Trial, texts: Mapping[str, str]) -> Certificate:
        request = replace(self._request, texts=dict(texts))
        contest = Contest(self._script, self._script, self._request, request)
        return certify(contest, fixed.original, after, self._progress)

    def _keep(self, fixed: Fixed, trial: Trial, tried: Attempt) -> Trial:
        assert tried.trial is not None
        before, project = profile_of(trial), self._script.project
        waits = waiting_lines(before, project)
        grown = grown_ms(tried, before, project)
        for rewrite, left, more in zip(tried.rewrites, tried.left, grown, strict=True):
            diff = self._diff(rewrite.match.source, rewrite)
            fixed.grown[self._key(rewrite.match)] = (len(fixed.records), more)
            self._note(fixed, rewrite.match, "applied", waits, diff=diff, left=left)
        fixed.texts, fixed.certificate = dict(tried.texts), tried.certificate
        fixed.planned = tried.trial
        return tried.trial

    def _revert(self, fixed: Fixed, trial: Trial, tried: Attempt) -> None:
        waits = waiting_lines(profile_of(trial), self._script.project)
        (rewrite,) = tried.rewrites
        left = tried.left[0] if tried.left else None
        self._note(fixed, rewrite.match, "reverted", waits, reason=tried.wrong, left=left)

    def _note(
        self,
        fixed: Fixed,
        match: Match,
        state: State,
        waits: Waits,
        *,
        reason: str = "",
        diff: str = "",
        left: int | None = None,
    ) -> None:
        """Record the state of a match, which is not tried again."""
        self._done.add(self._key(match))
        before = fixed.before[match.source.path]
        fixed.records.append(
            FixRecord(
                name=match.fix.name,
                path=_relative(match.source.path, self._script.project),
                line=line_before(before, match.source.text, match.lines[0]),
                state=state,
                equivalence=match.fix.equivalence,
                syncs_before=waits_of(match, waits),
                syncs_after=left,
                diff=diff,
                reason=reason,
                kinds=self._kinds.get(self._key(match), "") if state == "applied" else "",
            )
        )

    def _diff(self, source: SourceFile, rewrite: Rewrite) -> str:
        path = _relative(source.path, self._script.project)
        return diff_of(path, source.text, patch(source, [rewrite]).text)

    def _key(self, match: Match) -> Key:
        return match.fix.name, match.source.path, match.source.segment(match.node)

    def _place(self, match: Match) -> Place:
        return *self._key(match), *match.lines

    def _run(self, texts: dict[str, str], what: str) -> Trial:
        request = replace(self._request, texts=texts)
        return run_once(self._script, request, what, self._progress)
