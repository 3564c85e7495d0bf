"""Caches results computed from a profile, or another object, for the lifetime of that object."""

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
    """Cache the function by the identity of its first argument and the values of the others, all hashable."""
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
