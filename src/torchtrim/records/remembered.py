"""Results computed from a profile, or another object, are cached as long as that lives."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

P = ParamSpec("P")
S = TypeVar("S")
T = TypeVar("T")


def remembered(
    function: Callable[Concatenate[S, P], T],
) -> Callable[Concatenate[S, P], T]:
    """The function, called once for each first argument and further arguments, which are hashable."""
    known: dict[int, tuple[weakref.ref[S], dict[object, T]]] = {}

    @functools.wraps(function)
    def call(of: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        number = id(of)
        if number not in known or known[number][0]() is not of:
            known[number] = weakref.ref(of, lambda _: known.pop(number, None)), {}
        results = known[number][1]
        key = (args, tuple(kwargs.items()))
        if key not in results:
            results[key] = function(of, *args, **kwargs)
        return results[key]

    return call
