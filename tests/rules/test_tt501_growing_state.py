import pytest
from msgspec.structs import replace

from profiles import Step
from torchtrim.records.finding import Finding
from torchtrim.records.profile import Growth, Place, check
from torchtrim.rules.tt501_growing_state import check as find

USERS, LIBRARYS = Place("/home/me/run.py", 12, "main"), Place("/lib/sam2.py", 262, "Session.store")


def found(**given: object) -> Finding:
    facts = {"name": "tracker.memory", "kind": "dict", "bytes": 4096, "entries": 1.0}
    facts |= {"adapter": "", "place": 1, "caller": 0}
    growth = Growth(**{**facts, **given})  # type: ignore[arg-type]
    profile = replace(Step().profile(), places=[USERS, LIBRARYS], growths=[growth])
    assert check(profile) is None
    (finding,) = find(profile)
    return finding


def test_a_container_with_its_price_and_both_lines() -> None:
    finding = found()
    assert (finding.code, finding.path, finding.line) == ("TT501", "/home/me/run.py", 12)
    assert (finding.price_bytes, finding.count_per_step) == (4096, 1)
    assert finding.message == (
        "dict tracker.memory grows by 1 entry and 4.00 KiB a frame, filled at sam2.py:262 in Session.store"
    )


def test_the_users_own_line_is_the_place_alone() -> None:
    finding = found(place=0, caller=-1, entries=2.5)
    assert (finding.path, finding.line) == ("/home/me/run.py", 12)
    assert finding.message == "dict tracker.memory grows by 2.5 entries and 4.00 KiB a frame"


def test_no_line_is_the_script() -> None:
    finding = found(place=-1, caller=-1)
    assert (finding.path, finding.line) == ("train.py", 0)


@pytest.mark.parametrize(
    ("given", "words", "equivalence"),
    [
        ({"adapter": "bound_session"}, "bound_session(session, model)", "BITWISE"),
        ({"adapter": "bound_state"}, "bound_state(inference_state, predictor)", "BITWISE"),
        ({"adapter": "sink_cache"}, "sink_cache(model, ", None),
        ({}, 'bound_caches(model, {"memory": window(n)})', None),
        ({"name": 'state["memory"][0]'}, 'bound_caches(model, {"memory": window(n)})', None),
        ({"kind": "graph"}, "torch.inference_mode()", None),
        ({"kind": "lru_cache", "name": "table"}, "maxsize=", None),
        ({"kind": "tensor", "name": "state"}, "torchtrim.StateStore", None),
    ],
)
def test_each_kind_has_a_fix(given: dict[str, object], words: str, equivalence: str) -> None:
    fix = found(**given).fix
    assert fix is not None
    assert words in fix.reason
    assert (fix.kind, fix.equivalence) == ("advice", equivalence)


def test_a_profile_of_a_step_has_none() -> None:
    assert list(find(Step().profile())) == []


def test_places_that_are_not_there_are_refused() -> None:
    growth = Growth("a", "dict", 1, 1.0, "", 7, -1)
    wrong = check(replace(Step().profile(), growths=[growth]))
    assert wrong == "`growths[0].place` is 7, and `places` has 0 entries"
