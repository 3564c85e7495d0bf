"""Fixes the host-device syncs of a script, and what a report says of the fixes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from torchtrim.analysis.syncs import CODES
from torchtrim.certify.certify import Contest, certify
from torchtrim.errors import UnreadableInput
from torchtrim.records.certificate import Certificate
from torchtrim.records.finding import Finding, Suggestion
from torchtrim.records.fix import Fixes, FixRecord, State
from torchtrim.records.probes import ProbeResult
from torchtrim.records.profile import Profile
from torchtrim.records.report import Report, Result
from torchtrim.records.trial import Request, Trial
from torchtrim.report.assemble import with_planned
from torchtrim.rewriter.edits import compatible, diff_of, line_before, patch
from torchtrim.rewriter.files import write_sources
from torchtrim.rewriter.fix import Match, Rewrite, matches
from torchtrim.runner.script import Script, working_folder
from torchtrim.runner.trials import Progress, run_trial
from torchtrim.source.facts import Facts, FixRefused
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
    """The fixes of the host-device syncs in a script's own source, each proved.

    With `write` they are in the files afterwards, else only in the report's diff; before any file is
    written `ready` gets the diff. `unsafe`: apply also those that rest on what no run has shown.
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
    """The fixes, with the diff of all that were applied."""
    diff = "".join(
        diff_of(_relative(path, project), fixed.before[path], text)
        for path, text in sorted(fixed.texts.items())
    )
    return Fixes(
        places=tuple(_told(fixed.records)),
        syncs_before=_waits(fixed.original, project),
        syncs_after=_waits(fixed.planned or fixed.original, project),
        diff=diff,
        written=written,
        certificate=fixed.certificate,
    )


def _told(records: Sequence[FixRecord]) -> Iterator[FixRecord]:
    """The records without refusals of a line that another fix has freed of its syncs."""
    fixed_lines = {
        (one.path, one.line) for one in records if one.state == "applied" and not one.syncs_after
    }
    for record in records:
        if record.state != "refused" or (record.path, record.line) not in fixed_lines:
            yield record


def with_fixes(report: Report, fixes: Fixes) -> Report:
    """The report with the fixes, and with what became of each at its finding."""
    by_line: dict[tuple[str, int], list[FixRecord]] = {}
    for record in sorted(fixes.places, key=lambda one: _RANK[one.state]):
        by_line.setdefault((record.path, record.line), []).append(record)
    findings = tuple(
        _with_fix(finding, by_line.get((finding.path, finding.line), []))
        for finding in report.findings
    )
    return msgspec.structs.replace(report, findings=findings, fixes=fixes)


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
    return msgspec.structs.replace(finding, fix=fix)


def _waits(trial: Trial, project: Path) -> int:
    return sum(waiting_lines(trial.profile, project).values()) if trial.profile else 0


def _relative(path: str, project: Path) -> str:
    return str(Path(path).relative_to(project)) if Path(path).is_relative_to(project) else path


_MOST_ROUNDS = 20
Key = tuple[str, str, str]
"""A fix's name, the file, and the text that it is for."""
Place = tuple[str, str, str, int, int]
"""The same, and the first and last line."""


@dataclass
class Fixed:
    """What fixing gave: the new texts by absolute path, what became of each fix, and the proof.

    `grown` has, for each fix applied, the number of its record and by how many ms it keeps the device longer.
    """

    original: Trial
    texts: dict[str, str] = field(default_factory=dict)
    before: dict[str, str] = field(default_factory=dict)
    records: list[FixRecord] = field(default_factory=list)
    certificate: Certificate | None = None
    planned: Trial | None = None
    grown: dict[Key, tuple[int, float]] = field(default_factory=dict)


class Fixing:
    """Fixes one script. Nothing is written: the script is run as the texts would be.

    `unsafe`: apply also those fixes that rest on what nobody has seen, or may differ otherwise.
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
        self._looked: dict[Place, ProbeResult] = {}
        self._step_by_step = False

    def fix(self, original: Trial | None = None) -> Fixed:
        """Fix what can be fixed until nothing more is found, and is worth it together.

        Each fix can uncover the next sync, so whether they pay is judged at the end. Where they do not,
        the one that keeps the device longest is left out, and all begins anew. The certificate is on all
        fixes together. Where that is NOT EQUAL all begins anew too, each round with a certificate.
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
        """Certify all fixes together, unless they are. False where they must be taken round by round."""
        if fixed.planned is None or fixed.certificate is not None:
            return True
        certificate = self._certify(fixed, fixed.planned, fixed.texts)
        self._step_by_step = certificate.verdict == "NOT EQUAL"
        fixed.certificate = certificate
        return not self._step_by_step

    def _rounds(self, original: Trial) -> Fixed:
        fixed, trial = Fixed(original), original
        for number in range(_MOST_ROUNDS):
            if trial.profile is None:
                break
            rewrites = self._propose(fixed, trial.profile)
            if not rewrites:
                break
            made = self._settle(fixed, trial, rewrites, f"fixes, round {number + 1}")
            trial = made or trial
        return fixed

    def _slowest(self, fixed: Fixed) -> Key | None:
        """The fix that costs the device most, where all together cost more than the syncs."""
        if fixed.planned is None or not fixed.grown:
            return None
        reason = costs_more(profile_of(fixed.planned), profile_of(fixed.original))
        key, (number, grown) = max(fixed.grown.items(), key=lambda item: item[1][1])
        if not reason:
            return None
        record = fixed.records[number]
        why = f"its dense form keeps the device {grown:.3g} ms longer, more than the syncs cost: {reason}"
        self._too_slow.append(msgspec.structs.replace(record, state="reverted", reason=why))
        return key

    def _propose(self, fixed: Fixed, profile: Profile) -> list[Rewrite]:
        """The rewrites to try next; those that are not to be applied are noted."""
        waits = waiting_lines(profile, self._script.project)
        found = self._found(fixed, profile)
        observed = self._observe(fixed, found) if found else ()
        return compatible(
            rewrite
            for match, seen in zip(found, observed, strict=True)
            if (rewrite := self._judge(fixed, match, seen, waits)) is not None
        )

    def _found(self, fixed: Fixed, profile: Profile) -> list[Match]:
        """What waits in a profile and can be rewritten, and was not tried."""
        waits = waiting_lines(profile, self._script.project)
        return [
            match
            for path in sorted({path for path, _ in waits})
            for match in self._matches(fixed, path)
            if waits_of(match, waits) and self._key(match) not in self._done
        ]

    def _judge(self, fixed: Fixed, match: Match, seen: ProbeResult, waits: Waits) -> Rewrite | None:
        """The rewrite of a match if it may be applied; else what speaks against it is noted."""
        try:
            rewrite = match.fix.rewrite(match, Facts(seen))
            if rewrite.safe or self._unsafe:
                return rewrite
            diff = self._diff(match.source, rewrite)
        except FixRefused as error:
            self._note(fixed, match, "refused", waits, reason=str(error))
            return None
        reason = rewrite.risk or f"nobody has seen that {' and that '.join(rewrite.open_needs)}"
        self._note(fixed, match, "suggested", waits, reason=reason, diff=diff)
        return None

    def _matches(self, fixed: Fixed, path: str) -> list[Match]:
        try:
            if path not in fixed.before:
                fixed.before[path] = read_source(Path(path))[0]
            return list(matches(SourceFile(path, fixed.texts.get(path, fixed.before[path]))))
        except UnreadableInput:
            return []

    def _observe(self, fixed: Fixed, found: Sequence[Match]) -> tuple[ProbeResult, ...]:
        """What the matches' expressions hold; the original is looked at once."""
        if fixed.texts:
            return self._look(fixed, found)
        new = [match for match in found if self._place(match) not in self._looked]
        if new:
            self._looked |= zip(map(self._place, new), self._look(fixed, new), strict=True)
        return tuple(self._looked[self._place(match)] for match in found)

    def _look(self, fixed: Fixed, found: Sequence[Match]) -> tuple[ProbeResult, ...]:
        probes = tuple(match.probe(number) for number, match in enumerate(found))
        request = msgspec.structs.replace(
            self._request, texts=fixed.texts, probes=probes, measured=False
        )
        return self._run_request(request, "looking at values").observed

    def _settle(
        self, fixed: Fixed, trial: Trial, rewrites: Sequence[Rewrite], what: str
    ) -> Trial | None:
        """Apply all rewrites together; where that fails, the first that may stay. None if none may."""
        together = self._try(fixed, trial, rewrites, what)
        if not together.wrong:
            return self._keep(fixed, trial, together)
        if len(rewrites) == 1:
            self._revert(fixed, trial, together)
            return None
        for rewrite in rewrites:
            alone = self._try(fixed, trial, [rewrite], f"{what}, {rewrite.match.fix.name}")
            if not alone.wrong:
                return self._keep(fixed, trial, alone)
            self._revert(fixed, trial, alone)
        return None

    def _try(self, fixed: Fixed, trial: Trial, rewrites: Sequence[Rewrite], what: str) -> Attempt:
        before, project = profile_of(trial), self._script.project

        def run(texts: dict[str, str]) -> Trial:
            return self._run(texts, what)

        found = attempt(rewrites, fixed.texts, before, project, run)
        if found.wrong or found.trial is None or not self._step_by_step:
            return found
        certificate = self._certify(fixed, found.trial, found.texts)
        unequal = certificate.verdict == "NOT EQUAL"
        return found._replace(certificate=certificate, wrong=certificate.reason if unequal else "")

    def _certify(self, fixed: Fixed, after: Trial, texts: Mapping[str, str]) -> Certificate:
        request = msgspec.structs.replace(self._request, texts=dict(texts))
        contest = Contest(self._script, self._script, self._request, request)
        return certify(contest, fixed.original, after, self._progress)

    def _keep(self, fixed: Fixed, trial: Trial, made: Attempt) -> Trial:
        assert made.trial is not None
        before, project = profile_of(trial), self._script.project
        waits = waiting_lines(before, project)
        grown = grown_ms(made, before, project)
        for rewrite, left, more in zip(made.rewrites, made.left, grown, strict=True):
            diff = self._diff(rewrite.match.source, rewrite)
            fixed.grown[self._key(rewrite.match)] = (len(fixed.records), more)
            self._note(fixed, rewrite.match, "applied", waits, diff=diff, left=left)
        fixed.texts, fixed.certificate = dict(made.texts), made.certificate
        fixed.planned = made.trial
        return made.trial

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
        """Note what became of a match, which is not tried again."""
        self._done.add(self._key(match))
        before = fixed.before[match.source.path]
        fixed.records.append(
            FixRecord(
                name=match.fix.name,
                path=self._relative(match.source.path),
                line=line_before(before, match.source.text, match.lines[0]),
                state=state,
                equivalence=match.fix.equivalence,
                syncs_before=waits_of(match, waits),
                syncs_after=left,
                diff=diff,
                reason=reason,
            )
        )

    def _diff(self, source: SourceFile, rewrite: Rewrite) -> str:
        return diff_of(self._relative(source.path), source.text, patch(source, [rewrite]).text)

    def _relative(self, path: str) -> str:
        project = self._script.project
        return str(Path(path).relative_to(project)) if Path(path).is_relative_to(project) else path

    def _key(self, match: Match) -> Key:
        return match.fix.name, match.source.path, match.source.segment(match.node)

    def _place(self, match: Match) -> Place:
        return *self._key(match), *match.lines

    def _run(self, texts: dict[str, str], what: str) -> Trial:
        return self._run_request(msgspec.structs.replace(self._request, texts=texts), what)

    def _run_request(self, request: Request, what: str) -> Trial:
        with working_folder() as folder:
            return run_trial(
                self._script, request, folder, lambda text: self._progress(f"{what}: {text}")
            )
