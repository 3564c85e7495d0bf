"""Watches a training loop that knows nothing of it: modules, losses, optimizers, loaders."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch._C import _current_autograd_node
from torch.autograd.graph import GradientEdge
from torch.compiler import is_dynamo_compiling
from torch.jit import ScriptModule
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from torchtrim.capture.by_hand import ByHand
from torchtrim.capture.spent import watch_updates
from torchtrim.capture.steps import Steps

_EVALUATES = 3


class Listener:
    """What a watcher tells; override as needed. All are called in the thread that trains."""

    def module_starts(self, module: nn.Module, args: Any, kwargs: Any, depth: int) -> None:
        """A module's forward begins; `depth` 0 is a root. Called in recomputation too."""

    def module_ends(self, module: nn.Module, output: Any, depth: int) -> None:
        """A module's forward has ended; `output` is None if it raised."""

    def root_appears(self, root: nn.Module) -> None:
        """A root is about to run for the first time."""

    def optimizer_appears(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is known: the first forward is about to run, or else its own first step."""

    def backward_starts(self, tensors: tuple[torch.Tensor, ...]) -> None:
        """`backward` is about to run from these tensors."""

    def backward_ends(self) -> None:
        """`backward` has returned."""

    def optimizer_starts(self, optimizer: torch.optim.Optimizer) -> None:
        """`optimizer.step` is about to run."""

    def optimizer_ends(self, optimizer: torch.optim.Optimizer) -> None:
        """`optimizer.step` has run; gradients are as it used them."""

    def update_starts(self, optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> None:
        """A plan updates a parameter in backward; its gradient is final, and will be gone."""

    def update_ends(self, optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> None:
        """The parameter was updated."""

    def loader_asked(self, workers: int) -> None:
        """The loop is about to ask for a batch, of a loader with so many processes of its own."""

    def loader_waited(self, start_ns: int, end_ns: int, workers: int) -> None:
        """The loop waited this long for a batch."""

    def loader_appears(self, loader: DataLoader[Any]) -> None:
        """A loader was made."""

    def loader_begins(self, iterator: Any, loader: DataLoader[Any]) -> None:
        """A loop over a loader has begun."""

    def batch(self, iterator: Any, following: Callable[[Any], Any]) -> Any:
        """What the loop gets: what follows in its loader, or something else in its place."""
        return following(iterator)

    def training_begins(self) -> None:
        """The first top-level forward with gradients is about to run."""

    def step_idles(self) -> None:
        """The optimizers have stepped, and the loop now evaluates; more of the step will not come."""

    def step_ends(self) -> None:
        """The step is complete; called before the first operator of the next one."""


class Watcher:
    """Tells one listener of all that happens in this process and thread, between `install` and `remove`."""

    def __init__(self, listener: Listener, *, trains: bool = True) -> None:
        self.roots: list[nn.Module] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self.forwards = 0
        self.elsewhere = 0
        self.backwards = 0
        self.gradients = 0
        self.steps_by_hand = 0
        self._listener = listener
        self._trains = trains
        self._made: list[weakref.ref[torch.optim.Optimizer]] = []
        self._announced = 0
        self._steps: Steps | None = None
        self._watches = False
        self._depth = 0
        self._loading = False
        self._is_aside = False
        self._evaluations = 0
        self._by_hand = ByHand()
        self._pid = os.getpid()
        self._thread = threading.get_ident()
        self._undo = contextlib.ExitStack()

    def install(self) -> None:
        """Begin to watch. Where optimizers are known already, no others are waited for."""
        self._watches = True
        if self.optimizers:
            self._steps = Steps(len(self.optimizers))
        self._replace(nn.Module, "__call__", self._watched_call)
        self._replace(torch.optim.Optimizer, "__init__", self._watched_optimizer)
        self._replace(torch.autograd, "backward", self._watched_backward)
        self._replace(torch.autograd, "grad", self._counted_grad)
        self._replace(_BaseDataLoaderIter, "__next__", self._watched_next)
        self._replace(_BaseDataLoaderIter, "__init__", self._watched_loop)
        self._replace(DataLoader, "__init__", self._watched_loader)
        self._undo.callback(watch_updates(self._update_starts, self._update_ends))
        self._undo.callback(register_optimizer_step_pre_hook(self._optimizer_starts).remove)
        self._undo.callback(register_optimizer_step_post_hook(self._optimizer_ends).remove)

    def remove(self) -> None:
        """Stop watching; everything is as it was. What was put around ours meanwhile stays."""
        self._watches = False
        self._undo.close()

    def __enter__(self) -> Watcher:
        self.install()
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    @property
    def stepped(self) -> bool:
        """Whether an optimizer stepped since the last top-level forward."""
        self._see_updates_by_hand()
        return self._steps is not None and self._steps.dirty

    def follow(self) -> None:
        """Watch this process, a copy of the one that was watched."""
        self._pid = os.getpid()

    @property
    def would_end(self) -> bool:
        """Whether a top-level forward, if it came now, would begin a new step."""
        self._see_updates_by_hand()
        return self._steps is not None and copy.deepcopy(self._steps).forward()

    def step_closed(self) -> None:
        """Who drives the loop has said that the step is over: the next forward does not."""
        if self._steps is not None:
            self._steps.forward()

    def _replace(self, owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
        original = getattr(owner, name)
        ours = wrap(original)

        def restore() -> None:
            if getattr(owner, name) is ours:
                setattr(owner, name, original)

        setattr(owner, name, ours)
        self._undo.callback(restore)

    def _here(self) -> bool:
        watches = self._watches and not self._is_aside
        return watches and threading.get_ident() == self._thread and os.getpid() == self._pid

    def _is_elsewhere(self) -> bool:
        """Whether this call would count if it were in the thread that is watched; `forwards` has no such."""
        other = threading.get_ident() != self._thread and os.getpid() == self._pid
        if not other or not self._watches or self._is_aside or self._depth:
            return False
        return _current_autograd_node() is None and (not self._trains or torch.is_grad_enabled())

    def _watched_call(self, original: Any) -> Any:
        watcher = self

        # With stacks, torch's profiler takes the local `self` of what is `nn.Module.__call__` for the module.
        def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            unwatched = not watcher._here() or watcher._loading
            watcher.elsewhere += watcher._is_elsewhere()
            if unwatched or _is_traced() or isinstance(self, ScriptModule):
                return original(self, *args, **kwargs)
            if watcher._depth == 0 and _is_without_values(self.parameters()):
                with watcher.aside():
                    return original(self, *args, **kwargs)
            with watcher._running(self, args, kwargs) as done:
                output = original(self, *args, **kwargs)
                done(output)
            return output

        return call

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Nothing is watched meanwhile."""
        self._is_aside = True
        try:
            yield
        finally:
            self._is_aside = False

    @contextlib.contextmanager
    def _running(
        self, module: nn.Module, args: Any, kwargs: Any
    ) -> Iterator[Callable[[Any], None]]:
        recomputes = _current_autograd_node() is not None
        outermost = self._depth == 0 and not recomputes
        if outermost:
            self._root_starts(module)
        depth = self._depth
        outputs: list[Any] = []
        self._listener.module_starts(module, args, kwargs, -1 if recomputes else depth)
        self._depth += 1
        try:
            yield outputs.append
        finally:
            self._depth = depth
            output = outputs[0] if outputs else None
            self._listener.module_ends(module, output, -1 if recomputes else depth)

    def _root_starts(self, module: nn.Module) -> None:
        trains = not self._trains or torch.is_grad_enabled()
        if trains:
            self._segment_begins()
        if not any(module is root for root in self.roots):
            self.roots.append(module)
            self._listener.root_appears(module)
        if trains:
            self._announce()
            self.forwards += 1
            if self.forwards == 1:
                self._listener.training_begins()
        elif self.stepped:
            self._evaluations += 1
            if self._evaluations == _EVALUATES:
                self._listener.step_idles()

    def _watched_backward(self, original: Any) -> Any:
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._here():
                return original(tensors, *args, **kwargs)
            one = isinstance(tensors, (torch.Tensor, GradientEdge))
            several = (tensors,) if one else tuple(tensors)
            if _is_without_values(each for each in several if isinstance(each, torch.Tensor)):
                return original(several, *args, **kwargs)
            self.backwards += 1
            self._listener.backward_starts(
                tuple(each for each in several if isinstance(each, torch.Tensor))
            )
            try:
                return original(several, *args, **kwargs)
            finally:
                self._listener.backward_ends()
                if self._alone():
                    self._by_hand.backward_ends(self.roots)

        return backward

    def _counted_grad(self, original: Any) -> Any:
        @functools.wraps(original)
        def grad(*args: Any, **kwargs: Any) -> Any:
            self.gradients += self._here()
            return original(*args, **kwargs)

        return grad

    def _watched_next(self, original: Any) -> Any:
        def following(iterator: Any) -> Any:
            if not self._here() or self._loading:
                return original(iterator)
            workers = int(getattr(iterator, "_num_workers", 0))
            self._listener.loader_asked(workers)
            begin = time.perf_counter_ns()
            self._loading = True
            try:
                return self._listener.batch(iterator, original)
            finally:
                self._loading = False
                self._listener.loader_waited(begin, time.perf_counter_ns(), workers)

        return following

    def _watched_loop(self, original: Any) -> Any:
        @functools.wraps(original)
        def begin(iterator: Any, loader: Any, *args: Any, **kwargs: Any) -> None:
            original(iterator, loader, *args, **kwargs)
            if self._here() and not self._loading:
                self._listener.loader_begins(iterator, loader)

        return begin

    def _watched_loader(self, original: Any) -> Any:
        @functools.wraps(original)
        def make(loader: Any, *args: Any, **kwargs: Any) -> None:
            original(loader, *args, **kwargs)
            if self._here():
                self._listener.loader_appears(loader)

        return make

    def _optimizer_starts(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not self._here():
            return
        if any(callable(argument) for argument in (*args[1:], *kwargs.values())):
            self._segment_begins()
        self._number(optimizer)
        self._announce()
        self._listener.optimizer_starts(optimizer)

    def _update_starts(self, optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> None:
        if self._here():
            self._listener.update_starts(optimizer, parameter)

    def _update_ends(self, optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> None:
        if self._here():
            self._listener.update_ends(optimizer, parameter)

    def _segment_begins(self) -> None:
        """A forward is about to run, or a closure with forwards in it: the step before may be over."""
        self._see_updates_by_hand()
        if self._steps is not None and self._steps.forward():
            self._evaluations = 0
            self._listener.step_ends()

    def _alone(self) -> bool:
        """Whether the script has no optimizer, as far as is known."""
        return self._trains and not (self.optimizers or self._made)

    def _see_updates_by_hand(self) -> None:
        """Where there is no optimizer, parameters that changed since backward make a step."""
        if self._alone() and self._by_hand.changed():
            self.steps_by_hand += 1
            self._steps = self._steps or Steps(1)
            self._steps.stepped(0)

    def _optimizer_ends(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if not self._here():
            return
        number = self._number(optimizer)
        if self._steps is None:
            self._steps = Steps(_living_optimizers())
        self._steps.stepped(number)
        self._listener.optimizer_ends(optimizer)

    def _watched_optimizer(self, original: Any) -> Any:
        @functools.wraps(original)
        def begin(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
            original(optimizer, *args, **kwargs)
            if self._here():
                self._made.append(weakref.ref(optimizer))

        return begin

    def _announce(self) -> None:
        """Tell of the optimizers that were not known until now."""
        for made in self._made:
            if (optimizer := made()) is not None:
                self._number(optimizer)
        self._made.clear()
        while self._announced < len(self.optimizers):
            self._announced += 1
            self._listener.optimizer_appears(self.optimizers[self._announced - 1])

    def _number(self, optimizer: torch.optim.Optimizer) -> int:
        for number, known in enumerate(self.optimizers):
            if known is optimizer:
                return number
        self.optimizers.append(optimizer)
        return len(self.optimizers) - 1


def _is_without_values(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether the first is on the meta device, as where the operations of a model are only counted."""
    first = next(iter(tensors), None)
    return first is not None and first.device.type == "meta"


def _is_traced() -> bool:
    """Whether a call is written down for a graph, as by `torch.jit.trace`: it is no part of a step."""
    return is_dynamo_compiling() or torch._C._get_tracing_state() is not None


def _living_optimizers() -> int:
    """How many optimizers with state of their own live in this process."""
    gc.collect()
    return sum(
        isinstance(thing, torch.optim.Optimizer) and "defaults" in vars(thing)
        for thing in gc.get_objects()
        if issubclass(type(thing), torch.optim.Optimizer)
    )
