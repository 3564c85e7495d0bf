"""What was computed of a profile is computed once, and forgotten with it."""

from __future__ import annotations

import gc
import weakref

from profiles import Step
from torchtrim.records.profile import Profile
from torchtrim.records.remembered import remembered


def test_once_for_each_profile_and_argument() -> None:
    calls = []

    @remembered
    def count(profile: Profile, more: int = 0) -> int:
        calls.append(more)
        return len(profile.operators) + more

    one, other = Step().profile(), Step().profile()
    assert [count(one), count(one), count(other), count(one, more=2), count(one, 2)] == [
        0,
        0,
        0,
        2,
        2,
    ]
    assert calls == [0, 0, 2, 2]


def test_nothing_is_kept_alive() -> None:
    results = []

    @remembered
    def marked(profile: Profile) -> set[str]:
        results.append(weakref.ref(found := {profile.device, "of a profile"}))
        return found

    profile = Step().profile()
    gone = weakref.ref(profile)
    marked(profile)
    assert results[0]() is not None
    del profile
    gc.collect()
    assert gone() is None
    assert results[0]() is None
