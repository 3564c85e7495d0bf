"""Certifies a job of several ranks: each rank against itself, and the verdict of all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from torchtrim.certify.certify import Contest, certify
from torchtrim.certify.jobs import Jobs
from torchtrim.records.certificate import Certificate, Coverage, Verdict
from torchtrim.records.trial import Trial
from torchtrim.runner.script import Script, working_folder
from torchtrim.runner.trials import Progress, Workload

_ORDER: tuple[Verdict, ...] = ("BITWISE", "ROUNDING", "UNDECIDED", "NOT EQUAL")


def certify_ranks(
    contest: Contest, original: Trial, planned: Trial, progress: Progress
) -> Certificate:
    """The verdict on a planned trial: of its only process, or the worst of its ranks.

    Where a rank differs, the whole job runs again, once for all ranks, since they await each other.
    """
    if not original.ranks:
        return certify(contest, original, planned, progress)
    pairs = zip(original.ranks, planned.ranks, strict=True)
    with working_folder() as folder:
        contest = contest._replace(jobs=Jobs(folder))
        return _together(
            [
                certify(_of_rank(contest, number), one, other, progress)
                for number, (one, other) in enumerate(pairs)
            ]
        )


def _of_rank(contest: Contest, number: int) -> Contest:
    return contest._replace(
        original=_only(contest.original, number), planned=_only(contest.planned, number)
    )


def _only(workload: Workload, number: int) -> Workload:
    return workload._replace(only=number) if isinstance(workload, Script) else workload


def _together(each: Sequence[Certificate]) -> Certificate:
    """The certificate of the rank with the worst verdict, which names all of them."""
    worst = max(each, key=lambda one: _ORDER.index(one.verdict))
    number = each.index(worst)
    count = len(each)
    equal = worst.verdict == "BITWISE"
    return replace(
        worst,
        compared=tuple(f"{one} on each of {count} ranks" for one in worst.compared[:1])
        + worst.compared[1:],
        reason=f"on each of {count} ranks {worst.reason}"
        if equal
        else f"rank {number}: {worst.reason}",
        largest_difference=_largest(one.largest_difference for one in each),
        noise=_largest(one.noise for one in each),
        coverage=_covered([one.coverage for one in each if one.coverage is not None]),
    )


def _largest(figures: Iterable[float | None]) -> float | None:
    """The largest, None where one was not measured."""
    known = [*figures]
    measured = [one for one in known if one is not None]
    return max(measured) if len(measured) == len(known) else None


def _covered(each: Sequence[Coverage]) -> Coverage | None:
    """What was shown on any of the ranks, and which they are."""
    if not each:
        return None
    return replace(
        each[0],
        inputs=tuple(dict.fromkeys(one for part in each for one in part.inputs)),
        dtypes=tuple(sorted({one for part in each for one in part.dtypes})),
        batch_sizes=tuple(sorted({one for part in each for one in part.batch_sizes})),
        dimensions=tuple(sorted({one for part in each for one in part.dimensions})),
        modes=tuple(dict.fromkeys(one for part in each for one in part.modes)),
        processes=tuple(one for part in each for one in part.processes),
    )
