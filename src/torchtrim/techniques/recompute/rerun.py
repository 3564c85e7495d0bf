"""Runs a part of a model again in backward, instead of keeping what it saved.

The random numbers are kept (`torch.utils.checkpoint`, non-reentrant), the part runs to its end, since an
exception that stopped it early would pass through handlers of its own, and what the part writes beside its
results, such as BatchNorm's statistics, is written once: while it runs again, scratch copies with the values
of before the first run stand in their place (`executor.block_state`). A part whose code writes what cannot
be put back, such as a list, is refused; one that comes to do so later runs once from then on, and says so.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from torchtrim.capture.recording import tensors_in
from torchtrim.executor.block_state import Before, BlockState
from torchtrim.executor.chains import Range, Ranges
from torchtrim.executor.handles import Handle, Handles
from torchtrim.executor.places import Span, part_at
from torchtrim.executor.swap import Swapped
from torchtrim.techniques.recompute.arguments import as_they_are


class Told(Protocol):
    """Is told of what happens in a part."""

    def failed(self, error: BaseException) -> None:
        """An exception passes through it."""
        ...

    def has_run(self) -> None:
        """It has run, at first or again."""
        ...


class Untold:
    """Takes no notice."""

    def __init__(self, where: str) -> None: ...

    def failed(self, error: BaseException) -> None:
        """Nothing is done."""

    def has_run(self) -> None:
        """Nothing is done."""


Telling = Callable[[str], Told]


def rerun_places(
    roots: Mapping[str, nn.Module], where: Sequence[str], telling: Telling = Untold
) -> Handle:
    """Make modules, and ranges of Sequentials, run again, each by itself: those that a plan names."""
    whole, ranges = _sort(roots, where)
    swapped, at = Handles(), ""
    try:
        for at, module in whole:
            swapped.add(rerun_whole(module, at, telling(at)))
        for at, chain, spans in ranges:
            swapped.add(_again(spans, chain, at, telling))
    except BaseException as error:
        telling(at).failed(error)
        swapped.revert()
        raise
    return swapped


def rerun_whole(module: nn.Module, where: str, told: Told | None = None) -> Swapped:
    """Make a module run again as a whole. `told` hears of its runs."""
    return Swapped(module, functools.partial(_whole, Rerun(where, [module], told or Untold(where))))


def _sort(
    roots: Mapping[str, nn.Module], places: Sequence[str]
) -> tuple[list[tuple[str, nn.Module]], list[tuple[str, nn.Sequential, list[Span]]]]:
    """Modules that are named whole, and Sequentials with the ranges that are named of them: by path."""
    whole: list[tuple[str, nn.Module]] = []
    ranges: dict[int, tuple[str, nn.Sequential, list[Span]]] = {}
    for where in places:
        part = part_at(roots, where)
        if part.span is None:
            whole.append((where, part.module))
        else:
            path, chain = where.rpartition("[")[0], part.chain
            ranges.setdefault(id(chain), (path, chain, []))[2].append(part.span)
    return whole, list(ranges.values())


def _again(ranges: Sequence[Span], chain: nn.Sequential, where: str, telling: Telling) -> Ranges:
    """The ranges of a chain, each with the state of its modules."""
    found = []
    for first, last in ranges:
        at = f"{where}[{first}:{last}]"
        block = Rerun(at, list(chain)[first:last], telling(at))
        found.append(Range(first, last, functools.partial(_range, block)))
    return Ranges(chain, found)


def _whole(block: Rerun, forward: Callable[..., Any]) -> Callable[..., Any]:
    return functools.partial(_run, forward, block)


def _range(block: Rerun, forward: Callable[..., Any], value: Any) -> Any:
    return _run(forward, block, value)


def _run(function: Callable[..., Any], block: Rerun, *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled() or block.is_off():
        return function(*args, **kwargs)
    twice = _Twice(function, args, kwargs, block.told)
    return checkpoint(
        twice,
        *tensors_in((args, kwargs)),
        use_reentrant=False,
        preserve_rng_state=True,
        context_fn=block.contexts,
        early_stop=False,
    )


class _Twice:
    """A call that is made with its arguments, and then again with what they were at first.

    A block's list may be longer when backward comes, and a block may append to what it is given. So only the
    tensors among them are for torch's `checkpoint` to see, which keeps what it is given.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        told: Told,
    ) -> None:
        self._told = told
        self._function = function
        self._now: tuple[Any, Any] | None = (args, kwargs)
        self._then = as_they_are((args, kwargs))

    def __call__(self, *_: Any) -> Any:
        args, kwargs = self._now or as_they_are(self._then)
        self._now = None
        try:
            return self._function(*args, **kwargs)
        except Exception as error:
            self._told.failed(error)
            raise
        finally:
            self._told.has_run()


class _Anew(contextlib.AbstractContextManager[None]):
    """A context that can be entered again: a graph that is retained has more than one backward."""

    def __init__(self, make: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
        self._make = make
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> None:
        self._stack.enter_context(self._make())

    def __exit__(self, *error: object) -> None:
        self._stack.close()


class Rerun:
    """A block that runs again: its state, and who is told of its runs."""

    def __init__(self, where: str, modules: Sequence[nn.Module], told: Told) -> None:
        self.told = told
        self._state = BlockState(modules, where)

    def is_off(self) -> bool:
        """Whether the block has come to be one that may run only once; the first time it is said."""
        why = self._state.why_once()
        if why:
            self._state.says_once(why)
        return bool(why)

    def contexts(
        self,
    ) -> tuple[contextlib.AbstractContextManager[None], contextlib.AbstractContextManager[None]]:
        """Contexts for the first run and for the run in backward."""
        before = self._state.begin()
        return _first(before), _Anew(before.again)


@contextlib.contextmanager
def _first(before: Before) -> Iterator[None]:
    yield
    before.has_run()
