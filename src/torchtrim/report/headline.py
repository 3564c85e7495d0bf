"""Sums up a report in one sentence, which never claims more than the weakest result it covers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torchtrim.core.units import counted, format_apart, format_bytes, format_seconds
from torchtrim.records import Report
from torchtrim.records.finding import EQUIVALENCES, Equivalence
from torchtrim.records.report import StreamReport
from torchtrim.report.facts import (
    PEAKS,
    Tone,
    bracketed,
    count_of,
    difference_of,
    emulated_name,
    home,
    over_budget,
    peak_after,
    peak_before,
    percent,
    step_change,
    step_name,
    tone_of,
    weakest_verdict,
)
from torchtrim.report.sections import tuned_sentence

_EQUALITY: dict[Equivalence, str] = {
    "BITWISE": "identical bit for bit",
    "ROUNDING": "equal up to rounding",
    "SEMANTIC": "of a different function",
}
_EQUAL: dict[str, Equivalence] = {
    "BITWISE": "BITWISE",
    "ROUNDING": "ROUNDING",
    "AS ASKED": "SEMANTIC",
}


@dataclass(frozen=True, kw_only=True)
class Headline:
    """A sentence, its tone, and further figures. `verdict` is its machine-readable form."""

    word: str
    tone: Tone
    parts: tuple[str, ...]
    verdict: str


def headline(report: Report) -> Headline:
    """Return the headline of a report."""
    sentences = [*_fixes(report)]
    if not sentences or not _is_of_fixes(report):
        sentences.insert(0, _main(report))
    parts = (*_budget_parts(report), *_step_parts(report), *_failure_parts(report))
    verdict = _verdict(report)
    return Headline(word="; ".join(sentences), tone=_tone(report), parts=parts, verdict=verdict)


def _is_of_fixes(report: Report) -> bool:
    equal = report.certificate is None or tone_of(report.certificate) == "good"
    return report.budget_bytes is None and report.plan is None and equal


def _tone(report: Report) -> Tone:
    if over_budget(report) > 0:
        return "bad"
    if report.certificate:
        return tone_of(report.certificate)
    if report.stream is not None:
        return "bad" if _grows(report) else "good"
    return "good" if report.estimated is not None and report.budget_bytes is not None else "neutral"


def _main(report: Report) -> str:
    if report.tuned is not None:
        return tuned_sentence(report)
    verdict = report.certificate.verdict if report.certificate else ""
    peaks = _peaks(report)
    over = ", and the peak is over the budget" if over_budget(report) > 0 else ""
    varies = report.certificate is not None and report.certificate.noise
    undecided = (
        "the original differs from run to run" if varies else "equal or not, neither is shown"
    )
    unproven = {
        "NOT EQUAL": "NOT EQUAL: the results differ",
        "UNDECIDED": f"UNDECIDED: {undecided}{over}",
    }
    if verdict in unproven:
        return f"{unproven[verdict]}, {peaks}" if peaks else unproven[verdict]
    if report.stream is not None:
        return _stream(report, report.stream)
    return _of_memory(report, peaks)


def _of_memory(report: Report, peaks: str) -> str:
    results, is_over = _results(report), over_budget(report) > 0
    if report.floor_bytes is not None and is_over:
        missed = _missed(report.floor_bytes, report)
        return f"{missed}, {results}" if results else missed
    if is_over:
        lead = f"Does not fit {_missed_by(report)[1]}"
    elif _fits_already(report):
        return f"Fits already: {peaks.partition(' -> ')[0]}{emulated_name(report)}, nothing to plan"
    elif report.budget_bytes is not None and peaks:
        lead = "Fits" if report.planned or report.estimated else "Predicted to fit"
    elif results and report.verb == "verify":
        return f"Verified: {results}" + (f", {peaks}" if peaks else "")
    else:
        lead = count_of(report.findings) if report.verb == "diagnose" else report.verb.capitalize()
    return f"{lead}: {', '.join(one for one in (peaks, results) if one)}".rstrip(": ")


def _fits_already(report: Report) -> bool:
    plan = report.plan
    return (
        report.budget_bytes is not None
        and plan is not None
        and not plan.techniques
        and not plan.graphs
        and not report.pipeline
    )


def _missed(floor_bytes: int, report: Report) -> str:
    """Return the missed budget, the smallest feasible one, and the largest part of that peak."""
    budget, smallest = format_apart(report.budget_bytes or 0, floor_bytes)
    text = f"Does not fit {budget}: the smallest budget is {smallest}"
    before = peak_before(report)
    text += bracketed(f"{100 * floor_bytes / before:.0f} %") if before else ""
    if report.peak_parts:
        text += f", set by {report.peak_parts[0].what}"
    return text


def _missed_by(report: Report) -> tuple[str, ...]:
    """Return the peak that misses the budget, and the budget."""
    budget, after = report.budget_bytes or 0, peak_after(report)
    return format_apart(budget + over_budget(report) if after is None else after, budget)


def _peaks(report: Report) -> str:
    name, before, after = PEAKS[report.memory_kind], peak_before(report), peak_after(report)
    if before is None:
        return ""
    size = format_bytes(before)
    if report.compiled is not None:
        size = f"{format_bytes(report.compiled.peak_bytes)} compiled, {size} eagerly"
    text = f"{name} {size}"
    if after is not None:
        predicted = " predicted" if report.planned is None else ""
        shown = _missed_by(report)[0] if over_budget(report) > 0 else format_bytes(after)
        text += f" -> {shown}{predicted}{bracketed(percent(before, after))}"
    return f"{text}{emulated_name(report)}"


def _results(report: Report) -> str:
    """Return the weakest equivalence claimed by the certificate or by an applied change, in words."""
    if report.certificate is None or report.certificate.verdict not in _EQUAL:
        return ""
    techniques = report.plan.techniques if report.plan else ()
    applied = [one.equivalence for one in techniques]
    if report.fixes and report.plan is None:
        applied += [one.equivalence for one in report.fixes.places if one.state == "applied"]
    measured = _EQUAL[report.certificate.verdict]
    return f"results {_EQUALITY[max((measured, *applied), key=EQUIVALENCES.index)]}"


def _fixes(report: Report) -> Iterable[str]:
    fixes = report.fixes
    if fixes is None or not fixes.diff or not (fixes.written or _is_of_fixes(report)):
        return
    applied = [one.equivalence for one in fixes.places if one.state == "applied"]
    verdict = fixes.certificate.verdict if fixes.certificate else "BITWISE"
    count = counted(len(applied), "fix", "fixes") if applied else "fixes"
    text = f"{count} {'written' if fixes.written else 'suggested, not written yet'}"
    if verdict in ("BITWISE", "ROUNDING"):
        measured = _EQUAL[verdict]
        weakest = max((measured, *applied), key=EQUIVALENCES.index)
        text += f", {_EQUALITY[weakest]}"
        text += f" (here {_EQUALITY[measured]})" if weakest != measured else ""
    else:
        text += f", {verdict}"
    yield f"{text}, syncs {fixes.syncs_before} -> {fixes.syncs_after} a step"


def _stream(report: Report, stream: StreamReport) -> str:
    flat = "In bounds" if stream.growth_bytes else "Does not grow"
    growth = f"{format_bytes(stream.growth_bytes)} a frame"
    loose = stream.unbounded_growth_bytes
    parts = (
        f"{'Grows' if _grows(report) else flat}: {growth}",
        "" if loose is None else f"{format_bytes(loose)} without bounds",
        f"over {stream.frames} frames",
        count_of(report.findings) if report.findings else "",
        _results(report),
    )
    return ", ".join(part for part in parts if part)


def _grows(report: Report) -> bool:
    stream = report.stream
    return stream is not None and stream.growth_bytes > (stream.max_growth_bytes or 0)


def _budget_parts(report: Report) -> Iterable[str]:
    if report.budget_bytes is not None and report.floor_bytes is None:
        missed = over_budget(report)
        by = f" missed by {format_bytes(missed)}" if missed > 0 else ""
        yield f"budget {_missed_by(report)[1] if missed > 0 else format_bytes(report.budget_bytes)}{by}"
    if report.floor_bytes is not None or (_is_of_fixes(report) and any(_fixes(report))):
        yield _peaks(report)


def _step_parts(report: Report) -> Iterable[str]:
    if report.original is None or not report.original.step_seconds:
        return
    time = format_seconds(report.original.step_seconds)
    if report.compiled is not None:
        time = f"{format_seconds(report.compiled.step_seconds)} compiled, {time} eagerly"
    text = f"{step_name(report)} {time}"
    if report.planned is not None:
        change = step_change(report.original, report.planned)
        text += f" -> {format_seconds(report.planned.step_seconds)}{bracketed(change)}"
    elif report.plan is not None and not _fits_already(report):
        after = report.plan.predicted.step_seconds
        change = percent(report.original.step_seconds, after)
        text += f" -> {format_seconds(after)} predicted{bracketed(change)}"
    elif report.original.spread_seconds:
        text += f" +- {format_seconds(report.original.spread_seconds / 2)}"
    yield text


def _failure_parts(report: Report) -> Iterable[str]:
    certificate = report.certificate
    if certificate and certificate.first_difference and tone_of(certificate) != "good":
        yield f"first difference: {difference_of(certificate, home(report))}"
    if report.original is None and certificate and certificate.reason:
        yield certificate.reason


def _verdict(report: Report) -> str:
    """Return the verdict in the words that scripts match."""
    missed = over_budget(report) > 0
    if report.certificate:
        verdict = weakest_verdict(report)
        return f"{verdict}, BUDGET MISSED" if missed else verdict
    if missed:
        return "BUDGET MISSED"
    if report.stream is not None:
        bounded = "IN BOUNDS" if report.stream.growth_bytes else "FLAT"
        return "GROWS" if _grows(report) else bounded
    if report.estimated is not None and report.budget_bytes is not None:
        return "FITS"
    if report.verb != "diagnose":
        return report.verb.upper()
    return count_of(report.findings) if report.findings else "CLEAN"
