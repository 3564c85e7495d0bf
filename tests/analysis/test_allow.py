from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtrim.analysis.allow_list import Site, hold, near, sites, updated
from torchtrim.records import Finding
from torchtrim.records.allow import Entry

SEEN = {"train.py"}


def site(line: int = 3, count: int = 1, text: str = "x.item()", **more: object) -> Site:
    finding = Finding(
        code=str(more.get("code", "TT101")),
        path="/p/train.py",
        line=line,
        end_line=line,
        message="waits",
        count_per_step=count,
        price_ms=more.get("ms"),  # type: ignore[arg-type]
        price_bytes=more.get("bytes"),  # type: ignore[arg-type]
    )
    function = str(more.get("function", "step"))
    return Site(finding=finding, path="train.py", function=function, line_text=text)


def entry(count: int = 1, text: str = "x.item()", **more: str) -> Entry:
    return Entry(**{"code": "TT101", "path": "train.py", **more}, line_text=text, count=count)


def every(_: Finding) -> bool:
    return True


def test_what_is_within_its_count_does_not_count() -> None:
    outcome = hold([entry(2, reason="log")], [site(count=2)], SEEN)
    assert outcome.counted == ()
    assert [(a.used, a.count, a.line, a.reason) for a in outcome.allowed] == [(2, 2, 3, "log")]


def test_of_what_is_over_only_the_excess_counts() -> None:
    outcome = hold([entry(1)], [site(count=4, ms=8.0, bytes=400)], SEEN)
    (left,) = outcome.counted
    assert (left.count_per_step, left.price_ms, left.price_bytes) == (3, 6.0, 300)


@pytest.mark.parametrize(
    "other",
    [
        entry(code="TT102"),
        entry(path="other.py"),
        entry(text="y.item()"),
        entry(function="elsewhere"),
    ],
)
def test_what_does_not_match_is_unneeded_and_allows_nothing(other: Entry) -> None:
    outcome = hold([other], [site()], {"train.py", "other.py"})
    assert outcome.counted == (site().finding,)
    assert [e.used for e in outcome.allowed] == [0]


def test_an_entry_of_another_script_is_left_out() -> None:
    outcome = hold([entry(path="other.py")], [site()], SEEN)
    assert outcome.allowed == ()


def test_equal_lines_share_a_count_from_the_first_on() -> None:
    outcome = hold([entry(3)], [site(line=9, count=2), site(line=4, count=2)], SEEN)
    assert [(f.line, f.count_per_step) for f in outcome.counted] == [(9, 1)]
    assert [(a.line, a.used) for a in outcome.allowed] == [(4, 2), (9, 1)]


def test_an_entry_that_names_the_function_goes_first() -> None:
    wide, narrow = entry(1), entry(1, function="step")
    outcome = hold([wide, narrow], [site(count=1)], SEEN)
    assert [(a.function, a.used) for a in outcome.allowed] == [("", 0), ("step", 1)]


def test_a_finding_without_a_count_is_there_once() -> None:
    assert hold([entry(1)], [site(count=0)], SEEN).counted == ()


def test_updating_allows_exactly_what_is_there() -> None:
    found = [site(count=2), site(line=8, count=1), site(line=9, text="y.item()", function="")]
    assert updated([], found, SEEN, every) == (
        entry(1, text="y.item()"),
        entry(3, function="step"),
    )


def test_updating_keeps_entries_in_order_and_as_they_were_written() -> None:
    old = [entry(9, text="z.item()"), entry(5, reason="printed once an epoch")]
    found = [site(count=2), site(text="z.item()", count=1)]
    assert updated(old, found, SEEN, every) == (
        entry(1, text="z.item()"),
        entry(2, reason="printed once an epoch"),
    )


def test_updating_drops_what_nothing_matches_but_no_reason_and_no_other_script() -> None:
    old = [
        entry(text="gone"),
        entry(text="gone too", reason="because"),
        entry(path="other.py"),
    ]
    assert updated(old, [], SEEN, every) == tuple(old[1:])


def test_updating_adds_only_what_counts() -> None:
    assert updated([], [site()], SEEN, lambda _: False) == ()
    assert updated([entry(7)], [site()], SEEN, lambda _: False) == (entry(1),)


texts = st.sampled_from(["a", "b"])
functions = st.sampled_from(["", "f", "g"])
found_sites = st.lists(
    st.builds(
        lambda line, count, text, function: site(line, count, text, function=function),
        st.integers(1, 4),
        st.integers(1, 5),
        texts,
        functions,
    ),
    max_size=5,
)
lists = st.lists(
    st.builds(
        lambda count, text, function, reason: entry(count, text, function=function, reason=reason),
        st.integers(0, 5),
        texts,
        functions,
        st.sampled_from(["", "why"]),
    ),
    max_size=4,
)


@given(lists, found_sites)
def test_nothing_is_lost_between_allowed_and_counted(
    entries: list[Entry], found: list[Site]
) -> None:
    outcome = hold(entries, found, SEEN)
    used = sum(a.used for a in outcome.allowed)
    assert used + sum(f.count_per_step for f in outcome.counted) == sum(s.count for s in found)
    assert used <= sum(e.count for e in entries)


@given(lists, found_sites)
def test_after_an_update_nothing_counts_and_every_reason_is_there(
    entries: list[Entry], found: list[Site]
) -> None:
    after = updated(entries, found, SEEN, every)
    assert hold(after, found, SEEN).counted == ()
    assert sum(bool(e.reason) for e in after) == sum(bool(e.reason) for e in entries)
    assert updated(after, found, SEEN, every) == after


def test_sites_read_the_source(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("def step():\n    return   loss.item()\n")
    path = str(tmp_path / "train.py")
    found = Finding(code="TT101", path=path, line=2, end_line=2, message="", count_per_step=1)
    (one,) = sites([found], str(tmp_path))
    assert (one.path, one.function, one.line_text) == ("train.py", "step", "return   loss.item()")


@pytest.mark.parametrize(
    ("path", "project", "expected"),
    [
        ("/p/a/b.py", "/p", "a/b.py"),
        ("/p/a/b.py", "/p/", "a/b.py"),
        ("C:\\p\\a.py", "C:\\p", "a.py"),
        ("/pp/a.py", "/p", "/pp/a.py"),
        ("/v/lib/site-packages/torch/x.py", "/p", "torch/x.py"),
        ("a.py", "", "a.py"),
    ],
)
def test_paths_are_near(path: str, project: str, expected: str) -> None:
    assert near(path, project) == expected
