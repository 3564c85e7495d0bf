"""Compiled functions that call a model, whose forward is compiled away: a step begins at their calls."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.compiler import is_dynamo_compiling

from torchtrim.capture.watch import Watcher


class _Found(BaseException):
    """Ends the first compile of a function that trains, so that its call begins again as a forward."""


class _Function:
    """A compiled function. `roots`: the modules whose parameters it trains.

    `compiles`: graphs compiled in the current call.
    """

    def __init__(self, compiled: Callable[..., Any]) -> None:
        self.compiled = compiled
        self.roots: list[nn.Module] = []
        self.compiles = 0


def _called(_: nn.Module, compiled: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    return compiled(*args, **kwargs)


class CompiledCalls:
    """A watch for calls of compiled functions, as of a loss that calls the model, or of an optimizer's step.

    Which modules a function trains is known when its graphs are compiled: their inputs are the parameters.
    `calls` makes each call, given the first of these modules, the function and its arguments.
    """

    def __init__(self, watcher: Watcher, calls: Callable[..., Any] = _called) -> None:
        self._watcher = watcher
        self._calls = calls
        self._running: _Function | None = None

    @contextlib.contextmanager
    def noted(
        self, wrap: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None
    ) -> Iterator[None]:
        """Have the parameters of each graph noted, and its compiled function wrapped. Imports Inductor."""
        from torchtrim.compiled.inductor import noted

        with noted(self._compiles, wrap):
            yield

    def watched(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that calls a compiled one, and tells the watcher."""
        function = _Function(compiled)

        @functools.wraps(compiled)
        def call(*args: Any, **kwargs: Any) -> Any:
            if is_dynamo_compiling() or self._running is not None or not self._watcher.sees_calls():
                return compiled(*args, **kwargs)
            with self._watcher.updates():
                try:
                    return self._call(function, args, kwargs)
                except _Found:
                    return self._call(function, args, kwargs)

        return call

    def _call(self, function: _Function, args: Any, kwargs: Any) -> Any:
        function.compiles, self._running = 0, function
        try:
            if not function.roots:
                return function.compiled(*args, **kwargs)
            with self._watcher.called(function.roots, args, kwargs) as done:
                output = self._calls(function.roots[0], function.compiled, args, kwargs)
                done(output)
            return output
        finally:
            self._running = None

    def _compiles(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> None:
        function = self._running
        if function is None:
            return
        function.compiles += 1
        if not _trains(graph):
            return
        known = {id(each) for root in function.roots for each in root.parameters()}
        parameters = [each for each in inputs if isinstance(each, nn.Parameter)]
        new = [each for each in parameters if id(each) not in known]
        function.roots += roots_of(new)
        if not known and function.roots and function.compiles == 1:
            raise _Found


def _trains(graph: fx.GraphModule) -> bool:
    """Return True if a graph computes what has a gradient; an optimizer's step does not."""
    values = (node.meta.get("example_value") for node in graph.graph.nodes if _computes(node))
    return any(isinstance(each, torch.Tensor) and each.requires_grad for each in values)


def _computes(node: fx.Node) -> bool:
    return node.op in ("call_function", "call_method", "call_module")


def roots_of(parameters: Sequence[nn.Parameter]) -> list[nn.Module]:
    """Return the outermost living modules that own these parameters, in their order."""
    compiled = torch._dynamo.OptimizedModule
    modules = [one for one in gc.get_objects() if _is_module(one) and type(one) is not compiled]
    inner = {id(each) for one in modules for each in one._modules.values()}
    left = {id(each) for each in parameters}
    found: list[tuple[int, nn.Module]] = []
    places = {id(each): at for at, each in enumerate(parameters)}
    for one in modules:
        if id(one) not in inner:
            owned = [places[id(each)] for each in one.parameters() if id(each) in left]
            found += [(min(owned), one)] if owned else []
    return [one for _, one in sorted(found, key=lambda each: each[0])]


def _is_module(thing: Any) -> bool:
    return issubclass(type(thing), nn.Module) and "_modules" in vars(thing)
