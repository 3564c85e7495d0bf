"""Runs a part of a model again in backward, instead of keeping what it saved.

The random numbers are kept (`torch.utils.checkpoint`, non-reentrant), and buffers that the part writes,
such as BatchNorm's statistics, are written once: while it runs again, scratch copies with the values of
before the first run stand in their place. Plain attributes and the generators of Python and numpy are
put back likewise (`techniques.python_state`).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint

from torchtrim.observe.recording import tensors_in
from torchtrim.techniques.arguments import as_they_are
from torchtrim.techniques.chains import Range, Ranges
from torchtrim.techniques.early_stop import EarlyStop
from torchtrim.techniques.handles import Handle, Handles
from torchtrim.techniques.numbering import unnumbered
from torchtrim.techniques.places import Span, part_at
from torchtrim.techniques.python_state import PythonState
from torchtrim.techniques.swap import Swapped


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
            swapped.add(rerun_whole(module, telling(at)))
        for at, chain, spans in ranges:
            swapped.add(_again(spans, chain, at, telling))
    except BaseException as error:
        telling(at).failed(error)
        swapped.revert()
        raise
    return swapped


def rerun_whole(module: nn.Module, told: Told | None = None) -> Swapped:
    """Make a module run again as a whole. `told` hears of its runs."""
    return Swapped(module, functools.partial(_whole, Buffers([module], told or Untold(""))))


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
    """The ranges of a chain, each with the buffers of its modules."""
    found = []
    for first, last in ranges:
        buffers = Buffers(list(chain)[first:last], telling(f"{where}[{first}:{last}]"))
        found.append(Range(first, last, functools.partial(_range, buffers)))
    return Ranges(chain, found)


def _whole(buffers: Buffers, forward: Callable[..., Any]) -> Callable[..., Any]:
    return functools.partial(_run, forward, buffers)


def _range(buffers: Buffers, forward: Callable[..., Any], value: Any) -> Any:
    return _run(forward, buffers, value)


def _run(function: Callable[..., Any], buffers: Buffers, *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    twice = _Twice(function, args, kwargs, buffers.told)
    return checkpoint(
        twice,
        *tensors_in((args, kwargs)),
        use_reentrant=False,
        preserve_rng_state=True,
        context_fn=buffers.contexts,
        early_stop=twice.early_stop,
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
        self.early_stop: Any = EarlyStop(_Twice.__call__.__code__, self)

    def __call__(self, *_: Any) -> Any:
        args, kwargs = self._now or as_they_are(self._then)
        self._now = None
        self.early_stop.begin()
        try:
            return self._function(*args, **kwargs)
        except Exception as error:
            self._told.failed(error)
            raise
        finally:
            self._told.has_run()


Values = dict[tuple[int, str], torch.Tensor]


class _Anew(contextlib.AbstractContextManager[None]):
    """A context that can be entered again: a graph that is retained has more than one backward."""

    def __init__(self, make: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
        self._make = make
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> None:
        self._stack.enter_context(self._make())

    def __exit__(self, *error: object) -> None:
        self._stack.close()


class Buffers:
    """Sees to it that a block which runs twice writes its buffers once.

    Which buffers the block writes is learnt when it first runs in a mode (training or not), by their
    values: kernels such as BatchNorm's write without telling autograd. Those of norms always count.
    """

    def __init__(self, modules: Sequence[nn.Module], told: Told) -> None:
        self.told = told
        self._modules = [inner for module in modules for inner in module.modules()]
        self._written: dict[tuple[bool, ...], set[tuple[int, str]]] = {}

    def contexts(
        self,
    ) -> tuple[contextlib.AbstractContextManager[None], contextlib.AbstractContextManager[None]]:
        """Contexts for the first run and for the run in backward."""
        before: Values = {}
        python = PythonState(self._modules)
        again = _Anew(functools.partial(self._again, before, python))
        return self._first(before, python), again

    @contextlib.contextmanager
    def _first(self, before: Values, python: PythonState) -> Iterator[None]:
        mode = tuple(module.training for module in self._modules)
        written = self._written.get(mode)
        versions = {}
        with unnumbered():
            for at, buffer in self._buffers():
                if written is None or at in written:
                    before[at] = buffer.clone()
                    versions[at] = (buffer, buffer._version)
        yield
        python.has_run()
        if written is None:
            self._written[mode] = written = set()
            with unnumbered():
                for at, buffer in self._buffers():
                    if at in before and self._changed(at, buffer, before[at], *versions[at]):
                        written.add(at)
            for at in before.keys() - written:
                del before[at]

    @contextlib.contextmanager
    def _again(self, before: Values, python: PythonState) -> Iterator[None]:
        now = {(n, name): self._modules[n]._buffers[name] for n, name in before}
        for (n, name), value in before.items():
            self._modules[n]._buffers[name] = value.clone()
        try:
            with python.again():
                yield
        finally:
            for (n, name), buffer in now.items():
                self._modules[n]._buffers[name] = buffer

    def _changed(
        self,
        at: tuple[int, str],
        buffer: torch.Tensor,
        value: torch.Tensor,
        old: torch.Tensor,
        version: int,
    ) -> bool:
        if buffer is not old or buffer._version != version:
            return True
        return isinstance(self._modules[at[0]], _NormBase) or not torch.equal(buffer, value)

    def _buffers(self) -> Iterator[tuple[tuple[int, str], torch.Tensor]]:
        for number, module in enumerate(self._modules):
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    yield (number, name), buffer
