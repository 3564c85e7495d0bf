"""Watches an unmodified training loop: modules, losses, optimizers, loaders."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import itertools
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any
from weakref import ref

import torch

# `_disable_current_modes` imports it late. Inside a profile with stacks, torch would read the name of the
# module's freed code, which may not be UTF-8.
import torch._subclasses.schema_check_mode
from torch import nn
from torch._C import _current_autograd_node
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd.graph import GradientEdge
from torch.compiler import is_dynamo_compiling
from torch.jit import ScriptModule
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from torchtrim.capture.allocator import own
from torchtrim.capture.constructions import Constructions
from torchtrim.capture.spent import watch_updates
from torchtrim.capture.steps import Steps
from torchtrim.dispatch.frames import passed_through, uncompiled
from torchtrim.dispatch.patches import Patches
from torchtrim.dispatch.profilers import made
from torchtrim.dispatch.subclasses import patch_subclasses
from torchtrim.dispatch.threads import is_ours
from torchtrim.dryrun.run import current as current_dry

_EVALUATES = 3
"""Forwards without gradients in a row. Arbitrary: fewer may be predictions for a few samples."""
EVALUATED = 32
"""Arbitrary: forwards of an evaluation whose memory events take little memory."""


class Listener:
    """Callbacks of a watcher; override as needed. All are called in the training thread."""

    def module_starts(self, module: nn.Module, args: Any, kwargs: Any, depth: int) -> None:
        """A module's forward begins; `depth` 0 is a root. Called in recomputation too."""

    def module_ends(self, module: nn.Module, output: Any, depth: int) -> None:
        """A module's forward has ended; `output` is None if it raised."""

    def root_appears(self, root: nn.Module) -> None:
        """A root module is about to run for the first time."""

    def optimizer_appears(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer was found: the first forward or the optimizer's first step is about to run."""

    def backward_starts(self, tensors: tuple[torch.Tensor, ...]) -> None:
        """`backward` is about to run from these tensors."""

    def backward_ends(self) -> None:
        """`backward` has returned."""

    def optimizer_starts(self, optimizer: torch.optim.Optimizer) -> None:
        """`optimizer.step` is about to run."""

    def optimizer_ends(self, optimizer: torch.optim.Optimizer) -> None:
        """`optimizer.step` has run; gradients still have the values it used."""

    def update_starts(self, optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> None:
        """A plan is about to update a parameter in backward; its gradient is final and will be freed."""

    def update_ends(self, optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> None:
        """The parameter was updated."""

    def loader_asked(self, workers: int) -> None:
        """The loop is about to request a batch from a loader with `workers` processes."""

    def loader_waited(self, start_ns: int, end_ns: int, workers: int) -> None:
        """The loop waited this long for a batch."""

    def loader_appears(self, loader: DataLoader[Any]) -> None:
        """A loader was created."""

    def loader_begins(self, iterator: Any, loader: DataLoader[Any]) -> None:
        """A loop over a loader has begun."""

    def batch(self, iterator: Any, following: Callable[[Any], Any]) -> Any:
        """Return the batch the loop gets: `following(iterator)`, or another in its place."""
        return following(iterator)

    def training_begins(self) -> None:
        """The first top-level forward with gradients is about to run."""

    def step_idles(self) -> None:
        """The optimizers have stepped and the loop now evaluates; the step has no more operators.

        Called again every 32 forwards.
        """

    def step_ends(self) -> None:
        """The step is complete; called before the first operator of the next one."""


class Watcher:
    """A watcher of this process that notifies one listener, between `install` and `remove`.

    It watches one thread: the one that made it or, if it `follows`, another that trains before that.
    """

    def __init__(
        self,
        listener: Listener,
        *,
        trains: bool = True,
        constructions: Constructions | None = None,
        follows: bool = False,
    ) -> None:
        self.roots: list[nn.Module] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self.forwards = 0
        self.elsewhere = 0
        self.backwards = 0
        self.gradients = 0
        self.steps_by_hand = 0
        self._listener = listener
        self._trains = trains
        self._constructions = constructions
        self._created: list[ref[torch.optim.Optimizer]] = []
        self._announced = 0
        self._steps: Steps | None = None
        self._before: set[int] = set()
        self._watches = False
        self._depth = 0
        self._loading = False
        self._is_aside = False
        self._evaluations = 0
        self._ended: Counter[int] = Counter()
        self._by_hand = ByHand()
        self._pid = os.getpid()
        self._thread = threading.current_thread()
        self._moving = threading.Lock()
        self._is_settled = not follows
        self._patches = Patches()

    def install(self) -> None:
        """Begin to watch. If optimizers are known already, do not wait for others."""
        self._watches = True
        if self.optimizers:
            self._steps = Steps(len(self.optimizers))
        self._replace(nn.Module, "__call__", self._watched_call)
        if self._constructions is not None:
            self._constructions.watch(self._patches)
        created = self._created
        self._after_init(torch.optim.Optimizer, lambda one, *_, **__: created.append(ref(one)))
        patch_subclasses(self._patches)
        self._replace(torch.autograd, "backward", self._watched_backward)
        self._replace(torch.autograd, "grad", self._counted_grad)
        self._replace(_BaseDataLoaderIter, "__next__", self._watched_next)
        self._after_init(_BaseDataLoaderIter, self._loop_begins)
        self._after_init(DataLoader, lambda one, *_, **__: self._listener.loader_appears(one))
        self._patches.on_undo(made.follow())
        self._patches.on_undo(watch_updates(self._update_starts, self._update_ends))
        self._patches.on_undo(register_optimizer_step_pre_hook(self._optimizer_starts).remove)
        self._patches.on_undo(register_optimizer_step_post_hook(self._optimizer_ends).remove)

    def remove(self) -> None:
        """Stop watching and restore the patched functions, except those patched again since."""
        self._watches = False
        self._patches.undo()

    def __enter__(self) -> Watcher:
        self.install()
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    @property
    def stepped(self) -> bool:
        """True if an optimizer stepped since the last top-level forward."""
        self._see_updates_by_hand()
        return self._steps is not None and self._steps.dirty

    def watches_thread(self) -> bool:
        """Return True in the thread that is watched."""
        return threading.current_thread() is self._thread

    def follow(self) -> None:
        """Watch this process, a fork of the one that `install` watched."""
        self._pid = os.getpid()

    @property
    def would_end(self) -> bool:
        """True if a top-level forward would begin a new step now."""
        self._see_updates_by_hand()
        return self._steps is not None and copy.deepcopy(self._steps).forward()

    def step_closed(self) -> None:
        """End the step explicitly: the next forward does not end it again."""
        if self._steps is not None:
            self._steps.forward()

    def _replace(self, owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
        self._patches.replace(owner, name, wrap(getattr(owner, name)))

    def _after_init(self, kind: Any, then: Callable[..., None]) -> None:
        """Call `then` with the arguments of `__init__` after each instance is created here."""

        def wrap(original: Any) -> Any:
            @functools.wraps(original)
            def init(*args: Any, **kwargs: Any) -> None:
                original(*args, **kwargs)
                if self._here() or self._may_be_here():
                    then(*args, **kwargs)

            return init

        self._replace(kind, "__init__", wrap)

    def _loop_begins(self, iterator: Any, loader: Any, *_: Any, **__: Any) -> None:
        if not self._loading:
            self._listener.loader_begins(iterator, loader)

    @uncompiled
    def _here(self) -> bool:
        if not self._watches or self._is_aside:
            return False
        return self.watches_thread() and os.getpid() == self._pid

    def _may_be_here(self) -> bool:
        """Return True in another thread of the program before any has trained."""
        if not self._watches or self._is_aside or self._depth or is_ours():
            return False
        return not self._is_settled and os.getpid() == self._pid

    @uncompiled
    def _moves(self) -> bool:
        """Watch this thread from now on, if it is the first that trains. Return True if so."""
        with self._moving:
            moves = self._may_be_here()
            if moves:
                self._thread, self._is_settled = threading.current_thread(), True
        return moves

    def _moves_to(self, module: nn.Module) -> bool:
        """Return True at the first training call of another thread, and count further ones of roots.

        A call in training mode trains. Actors call models in evaluation mode, so there `backward` decides.
        """
        if not self._watches or self._is_aside or self._depth or os.getpid() != self._pid:
            return False
        if _current_autograd_node() is not None or (self._trains and not torch.is_grad_enabled()):
            return False
        if (module.training or not self._trains) and self._moves():
            return True
        self.elsewhere += not is_ours()
        return False

    def _watched_call(self, original: Any) -> Any:
        watcher = self

        # A torch profiler with stacks reads the module from the local `self` of `nn.Module.__call__`.
        def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            # A call that is traced, as by `torch.jit.trace`, is not part of a step. This comes first, since
            # dynamo traces what it passes, and would break its graph at the thread's number.
            if is_dynamo_compiling():
                return original(self, *args, **kwargs)
            if not (here := watcher._here()):
                here = watcher._moves_to(self)
            unwatched = not here or watcher._loading
            traced = torch._C._get_tracing_state() is not None
            if unwatched or traced or isinstance(self, ScriptModule):
                return original(self, *args, **kwargs)
            if watcher._depth == 0 and _is_without_values(self.parameters()):
                with watcher.aside():
                    return original(self, *args, **kwargs)
            with watcher._running(self, args, kwargs) as done:
                output = original(self, *args, **kwargs)
                done(output)
            return output

        return call

    def sees_calls(self) -> bool:
        """Return True where a forward would be one of a root: here, outside other forwards and backward."""
        if self._loading or self._depth or _current_autograd_node() is not None:
            return False
        return self._here() or self._moves()

    @contextlib.contextmanager
    def called(
        self, roots: Sequence[nn.Module], args: Any, kwargs: Any
    ) -> Iterator[Callable[[Any], None]]:
        """Watch a call of a compiled function as a forward of these roots, whose own are compiled away."""
        for root in roots[1:]:
            self._root_starts(root, is_transformed=False)
        with self._running(roots[0], args, kwargs) as done:
            yield done

    @contextlib.contextmanager
    def updates(self) -> Iterator[None]:
        """Notice the optimizers that step in compiled code, by the versions of their parameters."""
        self._announce()
        before = {number: self._updated(number) for number in range(len(self.optimizers))}
        yield
        for number, (versions, ended) in before.items():
            now = self._updated(number)
            if now[0] != versions and now[1] == ended:
                self._optimizer_starts(self.optimizers[number], (), {})
                self._optimizer_ends(self.optimizers[number], (), {})

    def _updated(self, number: int) -> tuple[int, int]:
        """Return the versions of an optimizer's parameters together, and how often hooks told of a step."""
        groups = self.optimizers[number].param_groups
        return sum(p._version for group in groups for p in group["params"]), self._ended[number]

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Watch nothing inside the block."""
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
            with temporarily_clear_interpreter_stack() as transforms:
                self._root_starts(module, is_transformed=bool(transforms))
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

    def _root_starts(self, module: nn.Module, *, is_transformed: bool) -> None:
        """Note an outermost call. Under a transform, as of `torch.vmap`, it computes with wrapped tensors."""
        trains = not self._trains or torch.is_grad_enabled()
        if trains:
            if self.forwards == 0:
                self._forget_steps()
            self._segment_begins()
        known = any(module is root for root in self.roots)
        if not known and not is_transformed:
            self.roots.append(module)
            self._listener.root_appears(module)
        if trains:
            self._announce()
            self.forwards += 1
            if self.forwards == 1:
                self._is_settled = True
                self._listener.training_begins()
        elif self.stepped:
            self._evaluations += 1
            if self._evaluations % EVALUATED == _EVALUATES:
                self._listener.step_idles()

    def _forget_steps(self) -> None:
        """Steps before the first forward are not the loop's: a plot of learning rates makes thousands."""
        if self._steps is not None and self._steps.dirty:
            self._before, self._steps = self._steps.seen, None

    def _watched_backward(self, original: Any) -> Any:
        @passed_through
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            if is_dynamo_compiling() or not (self._here() or self._moves()):
                return original(tensors, *args, **kwargs)
            is_one = isinstance(tensors, (torch.Tensor, GradientEdge))
            roots = (tensors,) if is_one else tuple(tensors)
            if not self._backward_starts(roots):
                return original(roots, *args, **kwargs)
            try:
                return original(roots, *args, **kwargs)
            finally:
                self._backward_ends()

        return backward

    @uncompiled
    def _backward_starts(self, roots: tuple[Any, ...]) -> bool:
        """Tell of a backward that begins. Return False if it has no values."""
        losses = tuple(each for each in roots if isinstance(each, torch.Tensor))
        if _is_without_values(losses):
            return False
        self.backwards += 1
        self._listener.backward_starts(losses)
        return True

    @uncompiled
    def _backward_ends(self) -> None:
        self._listener.backward_ends()
        if self._alone():
            self._by_hand.backward_ends(self.roots)

    def _counted_grad(self, original: Any) -> Any:
        @functools.wraps(original)
        @passed_through
        def grad(*args: Any, **kwargs: Any) -> Any:
            if not is_dynamo_compiling():
                self.gradients += self._here()
            return original(*args, **kwargs)

        return grad

    def _watched_next(self, original: Any) -> Any:
        def following(iterator: Any) -> Any:
            if not (self._here() or self._may_be_here()) or self._loading:
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

    @uncompiled
    def _optimizer_starts(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if is_dynamo_compiling() or not self._here():
            return
        if any(callable(argument) for argument in (*args[1:], *kwargs.values())):
            self._segment_begins()
        self._number(optimizer)
        self._announce()
        self._listener.optimizer_starts(optimizer)

    @uncompiled
    def _update_starts(self, optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> None:
        if self._here():
            self._listener.update_starts(optimizer, parameter)

    @uncompiled
    def _update_ends(self, optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> None:
        if self._here():
            self._listener.update_ends(optimizer, parameter)

    def _segment_begins(self) -> None:
        """Before a forward, or a closure that runs one: end the previous step if it is complete."""
        self._see_updates_by_hand()
        if self._steps is not None and self._steps.forward():
            self._evaluations = 0
            self._listener.step_ends()

    def _alone(self) -> bool:
        return self._trains and not (self.optimizers or self._created)

    def _see_updates_by_hand(self) -> None:
        """Without an optimizer, count parameters that changed since backward as a step."""
        if self._alone() and self._by_hand.changed():
            self.steps_by_hand += 1
            self._steps = self._steps or Steps(1)
            self._steps.stepped(0)

    @uncompiled
    def _optimizer_ends(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if is_dynamo_compiling() or not self._here():
            return
        number = self._number(optimizer)
        self._ended[number] += 1
        if self._steps is None:
            self._steps = Steps(_living_optimizers() - len(self._before - {number}))
        self._steps.stepped(number, in_backward=_current_autograd_node() is not None)
        self._listener.optimizer_ends(optimizer)

    def _announce(self) -> None:
        for created in self._created:
            if (optimizer := created()) is not None:
                self._number(optimizer)
        self._created.clear()
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
    """Return True if the first tensor is on the meta device, as in a program that only counts FLOPs."""
    first = next(iter(tensors), None)
    return first is not None and first.device.type == "meta"


def _living_optimizers() -> int:
    """Return the number of optimizers; one around another, with its parameters, does not count."""
    gc.collect()
    living = (
        thing
        for thing in gc.get_objects()
        if issubclass(type(thing), torch.optim.Optimizer)
        and isinstance(thing, torch.optim.Optimizer)
        and "defaults" in vars(thing)
    )
    number, owned = 0, set[int]()
    for one in living:
        own = {id(parameter) for group in one.param_groups for parameter in group["params"]}
        number += not own <= owned
        owned |= own
    return number


_LOOKED_AT = 256
"""Sampled parameters: a large model's first layers suffice."""
_ELEMENTS = 64
"""Sampled elements of each parameter, so that a sample takes under a millisecond."""


class ByHand:
    """A detector of parameter updates since the first reported backward, without an optimizer.

    It samples a few elements of each parameter, and in a dry run, which has none, counts its writes. An
    update changes nearly all; others, such as unused rows of an embedding, do not matter.
    """

    def __init__(self) -> None:
        self._then: list[tuple[nn.Parameter, tuple[int, int, bytes]]] = []

    def backward_ends(self, roots: Iterable[nn.Module]) -> None:
        """Sample the parameters that have a gradient, unless there is a sample already."""
        if self._then:
            return
        parameters = (
            p
            for root in roots
            for p in root.parameters()
            if p.layout is torch.strided and not p.is_meta and p.grad is not None
        )
        with _unseen():
            self._then = [(p, _some(p)) for p in itertools.islice(parameters, _LOOKED_AT)]

    def changed(self) -> bool:
        """Return True if any parameter changed, and drop the sample."""
        if not self._then:
            return False
        with _unseen():
            changed = any(_some(now) != then for now, then in self._then)
        if changed:
            self._then = []
        return changed


@contextlib.contextmanager
def _unseen() -> Iterator[None]:
    with torch.no_grad(), _disable_current_modes(), own():
        yield


def _some(parameter: nn.Parameter) -> tuple[int, int, bytes]:
    storage = parameter.untyped_storage()._cdata
    writes = dry.writes[storage] if (dry := current_dry()) else 0
    flat = parameter.detach().reshape(-1)
    some = flat[:: max(1, flat.numel() // _ELEMENTS)].contiguous()
    return storage, writes, bytes(some.view(torch.uint8).tolist())
