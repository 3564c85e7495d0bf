"""Reruns a part of a model in backward instead of keeping its saved tensors.

Uses `torch.utils.checkpoint` (non-reentrant), which restores the random state. The part runs to its end: an
exception to stop early could be caught by its own handlers. Side effects, such as updates of BatchNorm's
statistics, happen once: during the rerun, scratch copies with the values from before the first run take the
place of the state (`executor.block_state`), and copies that of the arguments (`executor.arguments`). Lists
that the part only appends to lose what the rerun appended. A part whose code has side effects that cannot be
undone, such as writing a file, is refused; one that does so later runs only once from then on, and warns.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from torchtrim.capture.code.side_effects import CalledFunction
from torchtrim.capture.recording import tensors_in
from torchtrim.executor.arguments import GivenArguments
from torchtrim.executor.block_state import Before, BlockState
from torchtrim.executor.chains import Range, Ranges
from torchtrim.executor.places import Span, part_at
from torchtrim.executor.registry import Handle, Handles
from torchtrim.executor.swap import Swapped

Telling = Callable[[str, BaseException | None], None]
"""Called with a place and the exception that leaves it, and with None at the end of each run and rerun."""


def _tell_nobody(where: str, error: BaseException | None) -> None: ...


def rerun_places(
    roots: Mapping[str, nn.Module], where: Sequence[str], telling: Telling = _tell_nobody
) -> Handle:
    """Make modules and ranges of Sequentials rerun in backward, each on its own."""
    whole, ranges = _by_path(roots, where)
    handles, at = Handles(), ""
    try:
        for at, module in whole:
            handles.add(Swapped(module, _whole(Rerun(at, [module], telling))))
        for at, chain, spans in ranges:
            blocks = [Rerun(f"{at}[{a}:{b}]", list(chain)[a:b], telling) for a, b in spans]
            runs = [functools.partial(run_again, block) for block in blocks]
            named = zip(spans, runs, blocks, strict=True)
            own = [Range(*span, run, block.where) for span, run, block in named]
            handles.add(Ranges(chain, own))
    except BaseException as error:
        telling(at, error)
        handles.revert()
        raise
    return handles


def _whole(block: Rerun) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    return lambda forward: functools.partial(run_again, block, forward)


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


def run_again(block: Rerun, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Run a block's function so that it reruns in backward, if gradients are on and it may run twice."""
    if not torch.is_grad_enabled() or block.is_off():
        return function(*args, **kwargs)
    given = GivenArguments((args, kwargs), block.owned)
    if given.why_once:
        block.says_once(given.why_once)
        return function(*args, **kwargs)
    return checkpoint(
        _RepeatableCall(block, function, (args, kwargs), given),
        *tensors_in((args, kwargs)),
        use_reentrant=False,
        preserve_rng_state=True,
        context_fn=functools.partial(block.contexts, given.generators),
        early_stop=False,
    )


class _RepeatableCall:
    """A call that can be made twice, the second time with its original arguments.

    A caller's list may grow before backward, or the block may append to it. Therefore `checkpoint`, which
    keeps its arguments, sees only the tensors among them.
    """

    def __init__(
        self,
        block: Rerun,
        function: Callable[..., Any],
        call: tuple[tuple[Any, ...], dict[str, Any]],
        given: GivenArguments,
    ) -> None:
        self._block = block
        self._function = function
        self._now: tuple[Any, Any] | None = call
        self._given = given

    def __call__(self, *_: Any) -> Any:
        args, kwargs = self._now or self._given.again()
        self._now = None
        try:
            return self._function(*args, **kwargs)
        except Exception as error:
            self._block.telling(self._block.where, error)
            raise
        finally:
            self._block.telling(self._block.where, None)


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
    """A block that reruns, and its state."""

    def __init__(
        self,
        where: str,
        modules: Sequence[nn.Module],
        telling: Telling,
        functions: Sequence[CalledFunction] = (),
    ) -> None:
        self.where = where
        self.telling = telling
        self._state = BlockState(modules, where, functions, takes_back=True)

    def is_off(self) -> bool:
        """Return True if the block may no longer rerun; warn the first time."""
        if why := self._state.why_once(same=True):
            self.says_once(why)
        return bool(why)

    @property
    def owned(self) -> frozenset[int]:
        """Return the ids of the modules whose state is kept for the rerun."""
        return self._state.owned

    def says_once(self, why: str) -> None:
        """Print once that the block runs without the plan, and why."""
        self._state.says_once(why)

    def contexts(
        self, generators: Sequence[Any] = ()
    ) -> tuple[contextlib.AbstractContextManager[None], contextlib.AbstractContextManager[None]]:
        """Return the contexts for the first run and for the rerun."""
        before = self._state.begin(generators=generators)
        return _first(before), _ReusableContext(before.again)


@contextlib.contextmanager
def _first(before: Before) -> Iterator[None]:
    yield
    before.has_run()
