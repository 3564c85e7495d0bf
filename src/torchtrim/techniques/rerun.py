"""Runs a part of a model again in backward, instead of keeping what it saved.

The random numbers are kept (`torch.utils.checkpoint`, non-reentrant), and buffers that the part writes,
such as BatchNorm's statistics, are written once: while it runs again, scratch copies with the values of
before the first run stand in their place. Plain attributes and the generators of Python and numpy are
put back likewise (`techniques.python_state`).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint

from torchtrim.errors import ApplyFailed
from torchtrim.techniques.arguments import as_they_are
from torchtrim.techniques.python_state import PythonState
from torchtrim.techniques.swap import Swapped

Range = tuple[int, int]


def rerun_whole(module: nn.Module) -> Swapped:
    """Make a module run again as a whole."""
    return Swapped(module, functools.partial(_whole, Buffers([module])))


def rerun_ranges(chain: nn.Sequential, ranges: Sequence[Range]) -> Swapped:
    """Make ranges of a Sequential's children run again, each by itself."""
    return Swapped(chain, functools.partial(_chain, chain, _apart(chain, ranges)))


def _apart(chain: nn.Sequential, ranges: Sequence[Range]) -> list[tuple[Range, Buffers]]:
    """The ranges in order, each with the buffers of its modules. They must not overlap."""
    position = 0
    apart = []
    for first, last in sorted(ranges):
        if not position <= first < last <= len(chain):
            raise ApplyFailed(
                f"the range [{first}:{last}] overlaps another or leaves a Sequential of {len(chain)}."
            )
        position = last
        apart.append(((first, last), Buffers(list(chain)[first:last])))
    return apart


def _whole(buffers: Buffers, forward: Callable[..., Any]) -> Callable[..., Any]:
    return functools.partial(_run, forward, buffers)


def _chain(
    chain: nn.Sequential, ranges: list[tuple[Range, Buffers]], _forward: Callable[..., Any]
) -> Callable[..., Any]:
    def forward(value: Any) -> Any:
        children = list(chain)
        position = 0
        for (first, last), buffers in ranges:
            value = _one_by_one(children[position:first], value)
            value = _run(functools.partial(_one_by_one, children[first:last]), buffers, value)
            position = last
        return _one_by_one(children[position:], value)

    return forward


def _one_by_one(modules: Sequence[nn.Module], value: Any) -> Any:
    for module in modules:
        value = module(value)
    return value


def _run(function: Callable[..., Any], buffers: Buffers, *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    return checkpoint(
        _Twice(function, args, kwargs),
        *args,
        use_reentrant=False,
        preserve_rng_state=True,
        context_fn=buffers.contexts,
    )


class _Twice:
    """A call that is made with its arguments, and then again with what they were at first.

    A block's list may be longer when backward comes, and a block may append to what it is given.
    """

    def __init__(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._function = function
        self._now: tuple[Any, Any] | None = (args, kwargs)
        self._then = as_they_are((args, kwargs))

    def __call__(self, *_: Any) -> Any:
        args, kwargs = self._now or as_they_are(self._then)
        self._now = None
        return self._function(*args, **kwargs)


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

    def __init__(self, modules: Sequence[nn.Module]) -> None:
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
        for at, buffer in self._buffers():
            if written is None or at in written:
                before[at] = buffer.clone()
                versions[at] = (buffer, buffer._version)
        yield
        python.has_run()
        if written is None:
            self._written[mode] = written = set()
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
