"""The certificate of a job of several ranks."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from planner.test_planner import profile_of
from torchtrim.certify import variants
from torchtrim.certify.compare import left_behind
from torchtrim.certify.contest import Contest
from torchtrim.certify.variants import certify_ranks
from torchtrim.records.certificate import Certificate, Verdict
from torchtrim.records.trial import Request, RootCall, Trial, TrialStep
from torchtrim.runner.script import Script

CONTEST = Contest(*[Script("train.py", processes=2)] * 2, *[Request()] * 2)


def trial(batch: int = 8) -> Trial:
    call = RootCall(root="Net", training=True, inputs=(f"float32[{batch}, 3]",))
    return Trial(request=Request(), steps=[TrialStep(digests={"loss:0": "a"}, calls=[call])])


def job(*batches: int) -> Trial:
    each = tuple(trial(batch) for batch in batches)
    return replace(each[0], ranks=each)


def nothing(_: str) -> None: ...


def test_ranks_that_are_all_equal() -> None:
    found = certify_ranks(CONTEST, job(8, 6), job(8, 6), nothing)
    assert found.verdict == "BITWISE"
    assert found.reason.startswith("on each of 2 ranks")
    assert found.coverage is not None
    assert found.coverage.batch_sizes == (6, 8)
    assert (found.largest_difference, found.noise) == (0.0, 0.0)


def test_one_process_is_certified_as_ever() -> None:
    found = certify_ranks(CONTEST, trial(), trial(), nothing)
    assert found.verdict == "BITWISE"
    assert "rank" not in found.reason


@pytest.mark.parametrize(
    ("verdicts", "worst", "number"),
    [
        (("BITWISE", "NOT EQUAL"), "NOT EQUAL", 1),
        (("UNDECIDED", "ROUNDING"), "UNDECIDED", 0),
        (("BITWISE", "ROUNDING"), "ROUNDING", 1),
    ],
)
def test_the_worst_rank_is_the_verdict_and_is_named(
    monkeypatch: pytest.MonkeyPatch, verdicts: tuple[Verdict, ...], worst: Verdict, number: int
) -> None:
    seen: list[int] = []

    def certify(contest: Contest, *_: Any) -> Certificate:
        assert isinstance(contest.original, Script)
        assert contest.original.only == contest.planned.only  # type: ignore[union-attr]
        seen.append(contest.original.only)
        return Certificate(
            verdict=verdicts[contest.original.only],
            compared=("1 loss", "2 gradients"),
            largest_difference=0.5 if number == contest.original.only else None,
            first_difference=None,
            noise=0.25,
            seeds="script",
            steps=1,
            reason="because",
        )

    monkeypatch.setattr(variants, "certify", certify)
    found = certify_ranks(CONTEST, job(8, 8), job(8, 8), nothing)
    assert seen == [0, 1]
    assert (found.verdict, found.reason) == (worst, f"rank {number}: because")
    assert (found.largest_difference, found.noise) == (None, 0.25)
    assert found.compared == ("1 loss on each of 2 ranks", "2 gradients")


@pytest.mark.parametrize(
    ("world", "left", "grows"),
    [
        (1, (0, 0, 0, 0, 9000, 9000), True),
        (1, (9000, 9000, 9000, 9000, 9000, 0), False),
        (2, (0, 0, 0, 0, 9000, 9000), False),
        (2, (9000, 9000, 9000, 9000, 9000, 9000), True),
    ],
)
def test_what_gloo_frees_unseen_in_some_steps_is_not_left_behind(
    world: int, left: tuple[int, ...], grows: bool
) -> None:
    request = Request(steps=len(left), warmup=0)
    trials = [
        Trial(
            request=request,
            profile=replace(profile_of("blocks"), world=world),
            steps=[TrialStep(peak_bytes=1, left_bytes=each) for each in (0, *kept)],
        )
        for kept in ([0] * len(left), left)
    ]
    assert bool(left_behind(*trials)) is grows
