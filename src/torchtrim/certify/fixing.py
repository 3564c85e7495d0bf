"""Cures the waits of a script's source, round by round, and proves each round before the next."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import msgspec

from torchtrim.certify.runs import Progress, run_trial
from torchtrim.certify.trial import Request, Trial
from torchtrim.certify.verify import Contest, certify
from torchtrim.errors import ScriptFailed, UnreadableInput
from torchtrim.observe.script import Script, working_folder
from torchtrim.records.certificate import Certificate
from torchtrim.records.fix import FixRecord, State
from torchtrim.records.profile import Profile
from torchtrim.records.seen import Observed
from torchtrim.rewrite.base import Fix, Match
from torchtrim.rewrite.edits import compatible, diff_of, line_before, patch
from torchtrim.rewrite.facts import Facts, Refused
from torchtrim.rewrite.registry import matches
from torchtrim.rewrite.source import Source, read_source
from torchtrim.rules.waits import waits_in

_MOST_ROUNDS = 20


@dataclass
class Fixed:
    """What fixing gave: the new texts by absolute path, what became of each cure, and the proof."""

    original: Trial
    texts: dict[str, str] = field(default_factory=dict)
    before: dict[str, str] = field(default_factory=dict)
    records: list[FixRecord] = field(default_factory=list)
    certificate: Certificate | None = None
    planned: Trial | None = None


class _Tried(NamedTuple):
    """A set of fixes that was run, and what came of it; `wrong` is empty where it may stay."""

    texts: dict[str, str]
    trial: Trial | None
    certificate: Certificate | None
    left: tuple[int, ...]
    wrong: str


class Fixing:
    """Fixes one script. Nothing is written: the script is run as the texts would be.

    `unsafe`: make also those cures that rest on what nobody has seen, or may differ otherwise.
    """

    def __init__(
        self, script: Script, request: Request, progress: Progress, *, unsafe: bool = False
    ) -> None:
        self._script = script
        self._request = request
        self._progress = progress
        self._unsafe = unsafe
        self._done: set[tuple[str, str, str]] = set()
        self._again: Trial | None = None

    def fix(self, original: Trial | None = None) -> Fixed:
        """Cure what can be cured until nothing more is found."""
        fixed = Fixed(original or self._run({}, "original"))
        trial = fixed.original
        for number in range(_MOST_ROUNDS):
            if trial.profile is None:
                break
            fixes, records = self._propose(fixed, trial.profile)
            fixed.records += records
            if not fixes:
                break
            tried = self._settle(fixed, trial, fixes, f"cures, round {number + 1}")
            if tried is None:
                continue
            assert tried.trial is not None
            fixed.texts, fixed.certificate, fixed.planned = (
                tried.texts,
                tried.certificate,
                tried.trial,
            )
            trial = tried.trial
        return fixed

    def _propose(self, fixed: Fixed, profile: Profile) -> tuple[list[Fix], list[FixRecord]]:
        """The fixes to try next, and records of those that are not to be made."""
        waits = waiting_lines(profile, self._script.project)
        found = [
            match
            for path in sorted({path for path, _ in waits})
            for match in self._matches(fixed, path)
            if waits_of(match, waits) and self._key(match) not in self._done
        ]
        if not found:
            return [], []
        observed = self._observe(fixed, found)
        fixes, records = [], []
        for match, seen in zip(found, observed, strict=True):
            try:
                fix = match.cure.fix(match, Facts(seen))
            except Refused as error:
                self._done.add(self._key(match))
                records.append(self._record(fixed, match, "refused", waits, reason=str(error)))
                continue
            if fix.safe or self._unsafe:
                fixes.append(fix)
            else:
                self._done.add(self._key(match))
                reason = fix.risk or f"nobody has seen that {' and that '.join(fix.open_needs)}"
                diff = self._diff(fixed, match.source, [fix])
                records.append(
                    self._record(fixed, match, "offered", waits, reason=reason, diff=diff)
                )
        return compatible(fixes), records

    def _matches(self, fixed: Fixed, path: str) -> list[Match]:
        try:
            if path not in fixed.before:
                fixed.before[path] = read_source(Path(path))[0]
            return list(matches(Source(path, fixed.texts.get(path, fixed.before[path]))))
        except UnreadableInput:
            return []

    def _observe(self, fixed: Fixed, found: Sequence[Match]) -> tuple[Observed, ...]:
        probes = tuple(match.probe(number) for number, match in enumerate(found))
        request = msgspec.structs.replace(self._request, texts=fixed.texts, probes=probes)
        return self._run_request(request, "looking at values").observed

    def _settle(self, fixed: Fixed, trial: Trial, fixes: Sequence[Fix], what: str) -> _Tried | None:
        """Try all together; where that fails, one after the other. None if none may stay."""
        tried = self._try(fixed, fixed.texts, trial, fixes, what)
        if not tried.wrong:
            self._made(fixed, trial, fixes, tried)
            return tried
        if len(fixes) == 1:
            self._taken_back(fixed, trial, fixes[0], tried)
            return None
        for fix in fixes:
            alone = self._try(fixed, fixed.texts, trial, [fix], f"{what}, {fix.match.cure.name}")
            if not alone.wrong:
                self._made(fixed, trial, [fix], alone)
                return alone
            self._taken_back(fixed, trial, fix, alone)
        return None

    def _try(
        self, fixed: Fixed, texts: dict[str, str], trial: Trial, fixes: Sequence[Fix], what: str
    ) -> _Tried:
        assert trial.profile is not None
        new, regions = dict(texts), []
        try:
            for source in {id(fix.match.source): fix.match.source for fix in fixes}.values():
                own = [fix for fix in fixes if fix.match.source is source]
                patched = patch(source, own)
                new[source.path] = patched.text
                regions += list(zip(own, patched.regions, strict=True))
            after = self._run(new, what)
        except (Refused, ScriptFailed) as error:
            return _Tried(new, None, None, (), str(error))
        left, wrong = self._waits_left(trial.profile, after, regions)
        if wrong:
            return _Tried(new, after, None, left, wrong)
        certificate = self._certify(fixed, after, new)
        unequal = certificate.verdict == "NOT EQUAL"
        return _Tried(new, after, certificate, left, certificate.reason if unequal else "")

    def _waits_left(
        self,
        before: Profile,
        after: Trial,
        regions: Sequence[tuple[Fix, tuple[int, int]]],
    ) -> tuple[tuple[int, ...], str]:
        """How many waits each fix leaves, and what is wrong if one leaves as many as there were."""
        if after.profile is None:
            return (), "with it the script did not come to a recorded step"
        was = waiting_lines(before, self._script.project)
        now = waiting_lines(after.profile, self._script.project)
        left = []
        for fix, (first, last) in regions:
            path = fix.match.source.path
            left.append(
                sum(n for (p, line), n in now.items() if p == path and first <= line <= last)
            )
            if left[-1] >= waits_of(fix.match, was):
                return tuple(left), "the line waits as often as before"
        if sum(now.values()) >= sum(was.values()):
            return tuple(left), "the step waits as often as before: the wait has moved"
        return tuple(left), ""

    def _certify(self, fixed: Fixed, after: Trial, texts: dict[str, str]) -> Certificate:
        if self._again is None:
            self._again = self._run({}, "original again")
        request = msgspec.structs.replace(self._request, texts=texts)
        contest = Contest(self._script, self._script, self._request, request)
        return certify(contest, fixed.original, self._again, after, self._progress)

    def _made(self, fixed: Fixed, trial: Trial, fixes: Sequence[Fix], tried: _Tried) -> None:
        assert trial.profile is not None
        waits = waiting_lines(trial.profile, self._script.project)
        for fix, left in zip(fixes, tried.left, strict=True):
            self._done.add(self._key(fix.match))
            fixed.records.append(
                self._record(
                    fixed,
                    fix.match,
                    "made",
                    waits,
                    diff=self._diff(fixed, fix.match.source, [fix]),
                    left=left,
                )
            )

    def _taken_back(self, fixed: Fixed, trial: Trial, fix: Fix, tried: _Tried) -> None:
        assert trial.profile is not None
        self._done.add(self._key(fix.match))
        waits = waiting_lines(trial.profile, self._script.project)
        left = tried.left[0] if tried.left else None
        fixed.records.append(
            self._record(fixed, fix.match, "taken back", waits, reason=tried.wrong, left=left)
        )

    def _first_line(self, fixed: Fixed, match: Match) -> int:
        source = match.source
        return line_before(fixed.before[source.path], source.text, match.lines[0])

    def _record(
        self,
        fixed: Fixed,
        match: Match,
        state: State,
        waits: Counter[tuple[str, int]],
        *,
        reason: str = "",
        diff: str = "",
        left: int | None = None,
    ) -> FixRecord:
        return FixRecord(
            cure=match.cure.name,
            path=self._relative(match.source.path),
            line=self._first_line(fixed, match),
            state=state,
            equivalence=match.cure.equivalence,
            waits_before=waits_of(match, waits),
            waits_after=left,
            diff=diff,
            reason=reason,
        )

    def _diff(self, fixed: Fixed, source: Source, fixes: Sequence[Fix]) -> str:
        return diff_of(self._relative(source.path), source.text, patch(source, fixes).text)

    def _relative(self, path: str) -> str:
        project = self._script.project
        return str(Path(path).relative_to(project)) if Path(path).is_relative_to(project) else path

    def _key(self, match: Match) -> tuple[str, str, str]:
        return match.cure.name, match.source.path, match.source.segment(match.node)

    def _run(self, texts: dict[str, str], what: str) -> Trial:
        return self._run_request(msgspec.structs.replace(self._request, texts=texts), what)

    def _run_request(self, request: Request, what: str) -> Trial:
        with working_folder() as folder:
            return run_trial(
                self._script, request, folder, lambda text: self._progress(f"{what}: {text}")
            )


def waiting_lines(profile: Profile, project: Path) -> Counter[tuple[str, int]]:
    """How often a step waits at each line of the project's files, by absolute path."""
    found: Counter[tuple[str, int]] = Counter()
    for path, line, _, _, count in waits_in(profile):
        absolute = (project / path).resolve()
        if absolute.is_relative_to(project) and line > 0:
            found[str(absolute), line] += count
    return found


def waits_of(match: Match, waits: Counter[tuple[str, int]]) -> int:
    """How often a step waits at the match's own lines."""
    first, last = match.lines
    path = match.source.path
    return sum(n for (p, line), n in waits.items() if p == path and first <= line <= last)
