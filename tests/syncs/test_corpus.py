"""The corpus of `bench.syncs`: its labels have sources, and the emulated accelerator agrees with them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from bench.syncs import Verdict, is_counted, on_cpu, ours, score, waits_of
from tests.cases.corpus import Snippet, snippets
from tests.cases.corpus.snippet import Thread

from torchtrim.emulator import emulate

CORPUS = snippets()
WAITING = [one for one in CORPUS if one.waits]
MISSED = {
    "covariance": "what a composite operator reads is of the host, until it meets a tensor of the device",
}


@pytest.fixture(scope="module")
def device() -> Iterator[None]:
    with emulate():
        yield


def test_it_is_large_enough() -> None:
    assert len(WAITING) >= 66
    assert len(CORPUS) - len(WAITING) >= 66
    assert sum(bool(one.repairs) for one in CORPUS) >= 60


def test_each_label_has_a_source() -> None:
    for one in CORPUS:
        assert one.evidence, one.name
        for found in one.evidence:
            assert isinstance(found, Thread) or found.line > 0
            assert found.note
            assert found.url.startswith("https://github.com/")


def test_a_repaired_form_waits_less() -> None:
    labels = {one.name: one.waits_before for one in CORPUS}
    for one in CORPUS:
        if one.repairs:
            assert one.waits_before < labels[one.repairs], one.name


def test_labels_do_not_come_from_the_table() -> None:
    for path in (Path(__file__).parents[1] / "cases" / "corpus").glob("*.py"):
        assert "syncs.lookup" not in path.read_text(encoding="utf-8")


@pytest.mark.parametrize("one", CORPUS, ids=lambda one: f"{one.family}-{one.name}")
def test_the_emulated_device_counts_as_the_source_says(
    one: Snippet, device: None, request: pytest.FixtureRequest
) -> None:
    if one.name in MISSED:
        request.applymarker(pytest.mark.xfail(reason=MISSED[one.name], strict=True))
    found = ours(one)
    assert is_counted(one, found), f"{found}, and the label says {one.waits}"


def test_a_call_that_does_nothing_waits_for_nothing(device: None) -> None:
    assert waits_of(lambda: None) == 0


def test_a_score_has_misses_and_false_finds() -> None:
    waits = next(one for one in CORPUS if one.waits == 1)
    free = next(one for one in CORPUS if not one.waits)
    found = score([waits, free], {waits.name: Verdict(0), free.name: Verdict(1)})
    assert (found["missed"], found["false"]) == ([waits.name], [free.name])
    assert (found["recall"], found["precision"], found["counts"]) == (0, 0, 0)
    found = score([waits, free], {waits.name: Verdict(1), free.name: Verdict(0, "not run")})
    assert (found["recall"], found["precision"], found["counts"]) == (1, 1, 0.5)


def test_the_text_of_the_corpus_runs_on_the_cpu() -> None:
    with on_cpu() as plain:
        assert plain["item_of_loss"].setup()() is not None
