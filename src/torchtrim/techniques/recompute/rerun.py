"""Reruns a part of a model in backward instead of keeping its saved tensors.

Uses `torch.utils.checkpoint` (non-reentrant), which restores the random state. The part runs to its end: an
exception to stop early could be caught by its own handlers. Side effects, such as updates of BatchNorm's
statistics, happen once: during the rerun, scratch copies with the values from before the first run take the
place of the state (`executor.block_state`). A part whose code has side effects that cannot be undone, such as
appending to a list, is refused; one that does so later runs only once from then on, and warns.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from torchtrim.capture.recording import COPIED_DEPTH, SHARED, tensors_in
from torchtrim.executor.block_state import Before, BlockState
from torchtrim.executor.chains import Range, Ranges
from torchtrim.executor.places import Span, part_at
from torchtrim.executor.registry import Handle, Handles
from torchtrim.executor.swap import Swapped


class RunListener(Protocol):
    """Listener for the runs of a part."""

    def failed(self, error: BaseException) -> None:
        """Called when an exception leaves the part."""
        ...

    def has_run(self) -> None:
        """Called after the first run and after each rerun."""
        ...


class SilentListener:
    """A listener that does nothing."""

    def __init__(self, where: str) -> None: ...

    def failed(self, error: BaseException) -> None:
        """Ignore the exception."""

    def has_run(self) -> None:
        """Ignore the run."""


Telling = Callable[[str], RunListener]


def rerun_places(
    roots: Mapping[str, nn.Module], where: Sequence[str], telling: Telling = SilentListener
) -> Handle:
    """Make modules and ranges of Sequentials rerun in backward, each on its own."""
    whole, ranges = _by_path(roots, where)
    swapped, at = Handles(), ""
    try:
        for at, module in whole:
            swapped.add(rerun_whole(module, at, telling(at)))
        for at, chain, spans in ranges:
            swapped.add(_rerun_ranges(spans, chain, at, telling))
    except BaseException as error:
        telling(at).failed(error)
        swapped.revert()
        raise
    return swapped


def rerun_whole(module: nn.Module, where: str, listener: RunListener | None = None) -> Swapped:
    """Make a module rerun as a whole. `listener` is notified of its runs."""
    return Swapped(
        module, functools.partial(_whole, Rerun(where, [module], listener or SilentListener(where)))
    )


def _by_path(
    roots: Mapping[str, nn.Module], places: Sequence[str]
) -> tuple[list[tuple[str, nn.Module]], list[tuple[str, nn.Sequential, list[Span]]]]:
    """Split the named parts into whole modules and Sequentials with their ranges, by path."""
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


def _rerun_ranges(
    ranges: Sequence[Span], chain: nn.Sequential, where: str, telling: Telling
) -> Ranges:
    """Return the ranges of a chain, each with the state of its modules."""
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
    twice = _RepeatableCall(function, args, kwargs, block.listener)
    return checkpoint(
        twice,
        *tensors_in((args, kwargs)),
        use_reentrant=False,
        preserve_rng_state=True,
        context_fn=block.contexts,
        early_stop=False,
    )


class _RepeatableCall:
    """A call that can be made twice, the second time with its original arguments.

    A caller's list may grow before backward, or the block may append to it. Therefore `checkpoint`, which
    keeps its arguments, sees only the tensors among them.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        listener: RunListener,
    ) -> None:
        self._listener = listener
        self._function = function
        self._now: tuple[Any, Any] | None = (args, kwargs)
        self._then = as_they_are((args, kwargs))

    def __call__(self, *_: Any) -> Any:
        args, kwargs = self._now or as_they_are(self._then)
        self._now = None
        try:
            return self._function(*args, **kwargs)
        except Exception as error:
            self._listener.failed(error)
            raise
        finally:
            self._listener.has_run()


class _ReusableContext(contextlib.AbstractContextManager[None]):
    """A context that can be entered repeatedly: a retained graph has several backward passes."""

    def __init__(self, make: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
        self._make = make
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> None:
        self._stack.enter_context(self._make())

    def __exit__(self, *error: object) -> None:
        self._stack.close()


class Rerun:
    """A block that reruns: its state, and the listener for its runs."""

    def __init__(self, where: str, modules: Sequence[nn.Module], listener: RunListener) -> None:
        self.listener = listener
        self._state = BlockState(modules, where)

    def is_off(self) -> bool:
        """Return True if the block may no longer rerun; warn the first time."""
        why = self._state.why_once()
        if why:
            self._state.says_once(why)
        return bool(why)

    def contexts(
        self,
    ) -> tuple[contextlib.AbstractContextManager[None], contextlib.AbstractContextManager[None]]:
        """Return the contexts for the first run and for the rerun."""
        before = self._state.begin()
        return _first(before), _ReusableContext(before.again)


@contextlib.contextmanager
def _first(before: Before) -> Iterator[None]:
    yield
    before.has_run()


_AS_IS = (torch.Tensor, *SHARED)


def as_they_are(value: Any) -> Any:
    """Copy the containers of a value; tensors and modules are shared.

    Copies lists, tuples, dicts, and objects with attributes, such as a key-value cache that each block
    extends. Anything that cannot be copied, or is nested deeper than eight levels, is shared.
    """
    return _fresh(value, {}, COPIED_DEPTH)


def _fresh(value: Any, known: dict[int, Any], depth: int) -> Any:
    if isinstance(value, _AS_IS) or not depth:
        return value
    if id(value) not in known:
        known[id(value)] = value
        known[id(value)] = _copied(value, known, depth - 1)
    return known[id(value)]


def _copied(value: Any, known: dict[int, Any], depth: int) -> Any:
    if isinstance(value, tuple):
        items = [_fresh(item, known, depth) for item in value]
        same = all(a is b for a, b in zip(items, value, strict=True))
        return value if same else _tuple_like(value, items)
    if isinstance(value, (list, dict)):
        return _container(value, known, depth)
    return _object(value, known, depth) if isinstance(_attributes(value), dict) else value


def _tuple_like(value: tuple[Any, ...], items: list[Any]) -> Any:
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)


def _container(value: Any, known: dict[int, Any], depth: int) -> Any:
    try:
        twin = copy.copy(value)
        if isinstance(value, list):
            twin[:] = [_fresh(item, known, depth) for item in value]
        else:
            for key, item in value.items():
                twin[key] = _fresh(item, known, depth)
    except Exception:
        return value
    return twin


def _object(value: Any, known: dict[int, Any], depth: int) -> Any:
    try:
        twin = copy.copy(value)
        for name, item in vars(value).items():
            vars(twin)[name] = _fresh(item, known, depth)
    except Exception:
        return value
    return twin


def _attributes(value: Any) -> Any:
    """Return an object's own attributes. Functions and the like have no state."""
    return None if callable(value) else getattr(value, "__dict__", None)
