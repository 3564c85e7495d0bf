"""Cures the waits of a script's source, round by round, and proves each round before the next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from torchtrim.certify.attempt import (
    Attempt,
    Waits,
    attempt,
    grown_ms,
    profile_of,
    waiting_lines,
    waits_of,
)
from torchtrim.certify.runs import Progress, run_trial
from torchtrim.certify.trial import Request, Trial
from torchtrim.certify.verify import Contest, certify
from torchtrim.certify.worth import costs_more
from torchtrim.errors import UnreadableInput
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

_MOST_ROUNDS = 20
Key = tuple[str, str, str]
"""A cure's name, the file, and the text that it is for."""


@dataclass
class Fixed:
    """What fixing gave: the new texts by absolute path, what became of each cure, and the proof.

    `grown` has, for each cure made, the number of its record and by how many ms it keeps the device longer.
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

    `unsafe`: make also those cures that rest on what nobody has seen, or may differ otherwise.
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
        self._too_dear: list[FixRecord] = []
        self._again: Trial | None = None

    def fix(self, original: Trial | None = None) -> Fixed:
        """Cure what can be cured until nothing more is found, and is worth it together.

        Each cure can uncover the next wait, so whether they pay is judged at the end. Where they do not,
        the one that keeps the device longest is left out, and all begins anew.
        """
        original = original or self._run({}, "original")
        while True:
            fixed = self._rounds(original)
            dear = self._dearest(fixed)
            if dear is None:
                fixed.records += self._too_dear
                return fixed
            self._left_out.add(dear)
            self._done = set(self._left_out)

    def _rounds(self, original: Trial) -> Fixed:
        fixed, trial = Fixed(original), original
        for number in range(_MOST_ROUNDS):
            if trial.profile is None:
                break
            fixes = self._propose(fixed, trial.profile)
            if not fixes:
                break
            made = self._settle(fixed, trial, fixes, f"cures, round {number + 1}")
            trial = made or trial
        return fixed

    def _dearest(self, fixed: Fixed) -> Key | None:
        """The cure that costs the device most, where all together cost more than the waits."""
        if fixed.planned is None or not fixed.grown:
            return None
        reason = costs_more(profile_of(fixed.planned), profile_of(fixed.original))
        key, (number, grown) = max(fixed.grown.items(), key=lambda item: item[1][1])
        if not reason:
            return None
        record = fixed.records[number]
        why = f"its dense form keeps the device {grown:.3g} ms longer, more than the waits cost: {reason}"
        self._too_dear.append(msgspec.structs.replace(record, state="taken back", reason=why))
        return key

    def _propose(self, fixed: Fixed, profile: Profile) -> list[Fix]:
        """The fixes to try next; those that are not to be made are noted."""
        waits = waiting_lines(profile, self._script.project)
        found = [
            match
            for path in sorted({path for path, _ in waits})
            for match in self._matches(fixed, path)
            if waits_of(match, waits) and self._key(match) not in self._done
        ]
        observed = self._observe(fixed, found) if found else ()
        return compatible(
            fix
            for match, seen in zip(found, observed, strict=True)
            if (fix := self._judge(fixed, match, seen, waits)) is not None
        )

    def _judge(self, fixed: Fixed, match: Match, seen: Observed, waits: Waits) -> Fix | None:
        """The fix of a match if it may be made; else what speaks against it is noted."""
        try:
            fix = match.cure.fix(match, Facts(seen))
            if fix.safe or self._unsafe:
                return fix
            diff = self._diff(match.source, fix)
        except Refused as error:
            self._note(fixed, match, "refused", waits, reason=str(error))
            return None
        reason = fix.risk or f"nobody has seen that {' and that '.join(fix.open_needs)}"
        self._note(fixed, match, "offered", waits, reason=reason, diff=diff)
        return None

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

    def _settle(self, fixed: Fixed, trial: Trial, fixes: Sequence[Fix], what: str) -> Trial | None:
        """Make all fixes together; where that fails, the first that may stay. None if none may."""
        together = self._try(fixed, trial, fixes, what)
        if not together.wrong:
            return self._keep(fixed, trial, together)
        if len(fixes) == 1:
            self._take_back(fixed, trial, together)
            return None
        for fix in fixes:
            alone = self._try(fixed, trial, [fix], f"{what}, {fix.match.cure.name}")
            if not alone.wrong:
                return self._keep(fixed, trial, alone)
            self._take_back(fixed, trial, alone)
        return None

    def _try(self, fixed: Fixed, trial: Trial, fixes: Sequence[Fix], what: str) -> Attempt:
        before, project = profile_of(trial), self._script.project

        def run(texts: dict[str, str]) -> Trial:
            return self._run(texts, what)

        found = attempt(fixes, fixed.texts, before, project, run)
        if found.wrong or found.trial is None:
            return found
        certificate = self._certify(fixed, found.trial, found.texts)
        unequal = certificate.verdict == "NOT EQUAL"
        return found._replace(certificate=certificate, wrong=certificate.reason if unequal else "")

    def _certify(self, fixed: Fixed, after: Trial, texts: Mapping[str, str]) -> Certificate:
        if self._again is None:
            self._again = self._run({}, "original again")
        request = msgspec.structs.replace(self._request, texts=dict(texts))
        contest = Contest(self._script, self._script, self._request, request)
        return certify(contest, fixed.original, self._again, after, self._progress)

    def _keep(self, fixed: Fixed, trial: Trial, made: Attempt) -> Trial:
        assert made.trial is not None
        before, project = profile_of(trial), self._script.project
        waits = waiting_lines(before, project)
        grown = grown_ms(made, before, project)
        for fix, left, more in zip(made.fixes, made.left, grown, strict=True):
            diff = self._diff(fix.match.source, fix)
            fixed.grown[self._key(fix.match)] = (len(fixed.records), more)
            self._note(fixed, fix.match, "made", waits, diff=diff, left=left)
        fixed.texts, fixed.certificate = dict(made.texts), made.certificate
        fixed.planned = made.trial
        return made.trial

    def _take_back(self, fixed: Fixed, trial: Trial, tried: Attempt) -> None:
        waits = waiting_lines(profile_of(trial), self._script.project)
        (fix,) = tried.fixes
        left = tried.left[0] if tried.left else None
        self._note(fixed, fix.match, "taken back", waits, reason=tried.wrong, left=left)

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
                cure=match.cure.name,
                path=self._relative(match.source.path),
                line=line_before(before, match.source.text, match.lines[0]),
                state=state,
                equivalence=match.cure.equivalence,
                waits_before=waits_of(match, waits),
                waits_after=left,
                diff=diff,
                reason=reason,
            )
        )

    def _diff(self, source: Source, fix: Fix) -> str:
        return diff_of(self._relative(source.path), source.text, patch(source, [fix]).text)

    def _relative(self, path: str) -> str:
        project = self._script.project
        return str(Path(path).relative_to(project)) if Path(path).is_relative_to(project) else path

    def _key(self, match: Match) -> Key:
        return match.cure.name, match.source.path, match.source.segment(match.node)

    def _run(self, texts: dict[str, str], what: str) -> Trial:
        return self._run_request(msgspec.structs.replace(self._request, texts=texts), what)

    def _run_request(self, request: Request, what: str) -> Trial:
        with working_folder() as folder:
            return run_trial(
                self._script, request, folder, lambda text: self._progress(f"{what}: {text}")
            )
