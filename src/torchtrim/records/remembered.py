"""What was computed of a profile is remembered as long as the profile lives."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

from torchtrim.records.profile import Profile

P = ParamSpec("P")
T = TypeVar("T")


def remembered(
    function: Callable[Concatenate[Profile, P], T],
) -> Callable[Concatenate[Profile, P], T]:
    """The function, called once for each profile and further arguments, which are hashable."""
    known: dict[int, tuple[weakref.ref[Profile], dict[object, T]]] = {}

    @functools.wraps(function)
    def call(profile: Profile, /, *args: P.args, **kwargs: P.kwargs) -> T:
        number = id(profile)
        if number not in known or known[number][0]() is not profile:
            known[number] = weakref.ref(profile, lambda _: known.pop(number, None)), {}
        results = known[number][1]
        key = (args, tuple(kwargs.items()))
        if key not in results:
            results[key] = function(profile, *args, **kwargs)
        return results[key]

    return call
