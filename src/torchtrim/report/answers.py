"""The four answers at the top of the page: what was wrong, what was done, why it is safe, what to type."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

from torchtrim.core.units import counted, format_apart, format_bytes
from torchtrim.core.words import listed
from torchtrim.records import Report
from torchtrim.records.figures import Figures
from torchtrim.records.finding import EQUIVALENCES
from torchtrim.records.fix import Fixes
from torchtrim.report import facts, plan_words


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A question and its answer. `verdict`: the certificate's word, if the answer is a proof."""

    question: str
    lines: tuple[str, ...]
    verdict: str = ""


def answers(report: Report) -> list[Answer]:
    """Return the answers that a report has, without what to type, which is `report.next`."""
    found = [
        Answer(question="What was wrong", lines=tuple(_wrong(report))),
        Answer(question="What was done", lines=tuple(_done(report))),
        Answer(question="Is it safe", lines=tuple(_safe(report)), verdict=verdict_of(report)),
    ]
    return [one for one in found if one.lines]


def _wrong(report: Report) -> Iterator[str]:
    peak, original = facts.peak_before(report), report.original
    if report.budget_bytes is not None and peak is not None and original is not None:
        yield from _over(report, peak, original)
    elif report.fixes is not None:
        yield _syncs(report, report.fixes)
    elif report.findings:
        worst = report.findings[0]
        where = facts.place(worst.path, worst.line, facts.home(report))
        count = facts.count_of(report.findings)
        yield f"{count}: {facts.families(report.findings)}. First: {worst.message}" + (
            f" (`{where}`)." if where else "."
        )
    elif original is not None or report.stream is not None:
        yield "Nothing was found."


def _syncs(report: Report, fixes: Fixes) -> str:
    if not fixes.syncs_before:
        return "Nothing: no line of the script waits for the device."
    every = sorted({(one.path, one.line) for one in fixes.places if one.line})
    lines = [_lines(report, path, [*group]) for path, group in groupby(every, key=itemgetter(0))]
    where = f", at {listed(lines)}" if lines else ""
    waits = facts.waits_of(report)
    cost = f": {waits}" if waits else ""
    return (
        f"The host waits for the device {counted(fixes.syncs_before, 'time')} a step{where}{cost}."
    )


def _lines(report: Report, path: str, places: Sequence[tuple[str, int]]) -> str:
    """Return `"`train.py:41`, 48 and 49"`."""
    first, *others = (line for _, line in places)
    return listed([f"`{facts.place(path, first, facts.home(report))}`", *others])


def _over(report: Report, peak: int, original: Figures) -> Iterator[str]:
    assert report.budget_bytes is not None
    over = peak - report.budget_bytes
    used, budget = format_apart(peak, report.budget_bytes)
    name = "the process" if report.memory_kind == "rss" else "the step"
    if over <= 0:
        yield f"Nothing: {name} peaks at {used}, within the budget of {budget}."
        return
    more = f"{format_bytes(over)} over the budget of {budget}"
    yield f"{name.capitalize()} peaks at {used}, {more}."
    if original.by_kind:
        kind, size = max(original.by_kind.items(), key=lambda item: item[1])
        yield f"{_are(kind)} the largest part, {format_bytes(size)}{_most(report, kind, size)}."


def _are(kind: str) -> str:
    """Return `"Activations are"` or `"Optimizer state is"`."""
    words = kind.replace("_", " ").capitalize()
    one = words.endswith(("state", "workspace", "input"))
    return f"{words} is" if one else f"{words.removesuffix('s')}s are"


def _most(report: Report, kind: str, size: int) -> str:
    """Return the line and the module with most of a kind: `", of which 4.57 MiB at `a.py:9` in `Net`"`."""
    holder = max(
        (one for one in report.holders if one.kind == kind and one.path),
        key=lambda one: one.bytes,
        default=None,
    )
    if holder is None:
        return ""
    part = f" of which {format_bytes(holder.bytes)}" if holder.bytes < size else ""
    whose = f" in `{holder.module}`" if holder.module else ""
    return f",{part} at `{facts.place(holder.path, holder.line, facts.home(report))}`{whose}"


def _done(report: Report) -> Iterator[str]:
    plan, fixes = plan_words.plan_lines(report), report.fixes
    if report.estimated is not None:
        yield "Nothing: the step was not computed, its tensors had shapes and no memory."
        return
    if plan and report.floor_bytes is not None:
        yield "The plan that needs least was tried:"
    elif plan and report.planned is None:
        yield "Planned, and not tried yet:"
    yield from plan
    if fixes is not None and fixes.diff and (fixes.written or not plan):
        applied = [one for one in fixes.places if one.state == "applied"]
        names = listed(dict.fromkeys(one.name for one in applied))
        state = "written" if fixes.written else "suggested, not written yet"
        yield f"{counted(len(applied), 'fix', 'fixes')}{facts.bracketed(names)}, {state}."
    elif report.original is not None and not plan:
        yield "Nothing: the program ran as it is."


def verdict_of(report: Report) -> str:
    """Return the weakest verdict that the page claims, empty without a certificate."""
    return facts.weakest_verdict(report) if report.certificate is not None else ""


def _safe(report: Report) -> Iterator[str]:
    certificate = report.certificate
    if certificate is not None:
        yield facts.SAFETY[facts.weakest_verdict(report)]
        equal = facts.tone_of(certificate) == "good"
        if certificate.first_difference is not None and not equal:
            yield f"First difference: {facts.difference_of(certificate, facts.home(report))}."
        elif certificate.reason and not equal:
            yield f"{certificate.reason}."
        proof = facts.proof_sentence(certificate).partition(": ")[2]
        claimed = facts.weakest_verdict(report) == certificate.verdict
        yield f"{proof}." if claimed else f"In this run, {proof}."
    elif report.plan is not None and not facts.is_idle(report):
        yield "Not known yet: the plan is a prediction. `torchtrim verify` measures it against the original."


def fixes_verdict(report: Report) -> str:
    """Return the verdict on fixes that were compared on their own, empty if they were not."""
    fixes = report.fixes
    if fixes is None or fixes.certificate is None or fixes.written or report.plan is None:
        return ""
    applied = [one.equivalence for one in fixes.places if one.state == "applied"]
    weakest = max(applied, key=EQUIVALENCES.index, default="BITWISE")
    verdict = fixes.certificate.verdict
    return "ROUNDING" if verdict == "BITWISE" and weakest != "BITWISE" else verdict
