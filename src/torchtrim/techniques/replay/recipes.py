"""Recipes that recompute dropped tensors."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Self

import torch

from torchtrim.errors import ApplyFailed
from torchtrim.executor.failing import note
from torchtrim.executor.ordinals import storage_number, unnumbered
from torchtrim.executor.saved_tensors import VersionedTensor, geometry_of, when_asked
from torchtrim.techniques.replay.table import CONJUGATING, TYPES, is_dense

_NINTHS = -0x7FBFDFEFF7FBFDFF
"""0x8040201008040201 as a signed number. Multiplying eight bytes of 0 or 1, read as one number, by it gathers
their bits in the highest byte, in reverse; multiplying a byte by it spreads the bits to the top of one byte
each.
"""
_LOWEST = 0x0101010101010101  # The lowest bit of each of eight bytes.


def packed(noise: torch.Tensor) -> torch.Tensor:
    """Return one bit per element, in memory order, set if it is not zero. The noise must be dense, and its
    size a multiple of eight.
    """
    truth = torch.as_strided(noise, (noise.numel(),), (1,), 0).to(torch.bool, copy=True)
    words = truth.view(torch.int64)
    return words.mul_(_NINTHS).bitwise_right_shift_(56).to(torch.uint8)


def unpacked(bits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the bits as ones and zeros, in one dimension."""
    words = bits.to(torch.int64)
    words.mul_(_NINTHS).bitwise_right_shift_(7).bitwise_and_(_LOWEST)
    return words.view(torch.uint8).to(dtype)


SELF = object()
"""Placeholder, among an in-place operator's arguments, for the tensor it writes."""


class KeptTensor(VersionedTensor):
    """A tensor that recipes read, or that autograd saves."""

    __slots__ = ()

    def read(self) -> torch.Tensor:
        """Return the tensor for a rerun. Raises `ApplyFailed` if it was written to and autograd would not."""
        tensor = self.tensor
        if not self.is_written or storage_number(tensor) in _SAVED:
            return self.get()
        raise ApplyFailed(
            f"a tensor of shape {list(tensor.shape)} was written to between a forward and its backward, and "
            "`replay` computes from it again, which the script alone does not. The run stops before that. "
            "Remove this place from the plan, or plan again."
        )

    @classmethod
    def detached(cls, tensor: torch.Tensor) -> Self:
        """Keep a tensor that autograd saves, without its graph."""
        kept = _SAVED[storage_number(tensor)] = super().detached(tensor)
        return kept


_SAVED: weakref.WeakValueDictionary[int, KeptTensor] = weakref.WeakValueDictionary()
"""What autograd saved itself, by storage: it raises if that was written to, with or without a plan."""


class RecipeView(NamedTuple):
    """A view of a recipe's result, as an operator or autograd saw it after the first `steps` steps."""

    recipe: Recipe
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    steps: int

    def get(self, *, asked: bool = False) -> torch.Tensor:
        """Return the view of the recomputed tensor. `asked`: by autograd, not for another recipe."""
        return self.recipe.view(self, asked=asked)


class SavedRecipe:
    """Autograd's substitute for a saved tensor. It is unpacked once, unless the graph is retained."""

    __slots__ = ("_part",)

    def __init__(self, part: RecipeView) -> None:
        self._part = part

    def get(self) -> torch.Tensor:
        """Return the recomputed tensor."""
        return self._part.get(asked=True)


class AwaitedRecipe(SavedRecipe):
    """A saved recipe before its first unpacking: its recipe counts it as a reader.

    Once unpacked it is a plain `SavedRecipe`: backward destroys thousands, and Python drops an interrupt by
    the user that arrives while a `__del__` runs.
    """

    __slots__ = ()

    def __init__(self, part: RecipeView) -> None:
        super().__init__(part)
        part.recipe.users += 1

    def get(self) -> torch.Tensor:
        """Return the recomputed tensor, and leave."""
        try:
            return self._part.get(asked=True)
        finally:
            self.__class__ = SavedRecipe  # type: ignore[assignment]
            when_asked(self._part.recipe.leave)

    def __del__(self) -> None:
        self._part.recipe.leave()


class RecipeStep(NamedTuple):
    """A recorded operator. Its arguments contain `KeptTensor`, `RecipeView` and `SELF`."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Recipe:
    """Steps that recompute one storage: an operator that allocates it, and in-place writes.

    `users` counts pending readers: saved tensors, and recipes that depend on this one. The recomputed value
    is kept until the last of them has read it.
    """

    __slots__ = ("_owes", "_value", "path", "pinned", "steps", "users")

    def __init__(self, step: RecipeStep, path: str) -> None:
        self.steps = [step]
        self.path = path
        self.users = 0
        self.pinned = False
        self._value: torch.Tensor | None = None
        self._owes: list[Recipe] = []
        self._owe(step)

    def add(self, step: RecipeStep) -> None:
        """Append an in-place operator."""
        self.steps.append(step)
        self._owe(step)

    def _owe(self, step: RecipeStep) -> None:
        for part in recorded_among((step.args, step.kwargs)):
            if isinstance(part, RecipeView):
                part.recipe.users += 1
                self._owes.append(part.recipe)

    def _settle(self) -> None:
        while self._owes:
            self._owes.pop().leave()

    __del__ = _settle

    def view(self, part: RecipeView, *, asked: bool = False) -> torch.Tensor:
        """Return a view of the recomputed value."""
        if part.steps != len(self.steps):
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace "
                "operation after it was saved."
            )
        value = self._again(asked=asked)
        if (part.size, part.stride, part.offset) == geometry_of(value):
            return value
        return torch.as_strided(value, part.size, part.stride, part.offset)

    def leave(self) -> None:
        """Remove a reader that has read the value or never will."""
        self.users -= 1
        if self.users <= 0 and not self.pinned:
            self._value = None

    def pin(self) -> None:
        """Recompute now and keep the value, because an input is about to change."""
        self._value = self._again()
        self.pinned = True
        self.steps = [NEVER for _ in self.steps]

    def lose(self) -> None:
        """Give the value up, because an input is about to change and no backward is expected to ask."""
        if self._value is None:
            self.steps = [_LOST for _ in self.steps]
            self._settle()

    def _again(self, *, asked: bool = False) -> torch.Tensor:
        if self._value is not None:
            return self._value
        try:
            with as_first():
                value = _conjugated(self._run()) if asked else self._run()
        except Exception as error:
            note(error, self.path)
            raise
        if self.users > 0:
            self._value = value
        return value

    def _run(self) -> torch.Tensor:
        first, *writes = self.steps
        results = first.func(*filled(first.args), **filled(first.kwargs))
        value = _written(results[0] if isinstance(results, (tuple, list)) else results, writes)
        self._settle()
        return value


class Noise(Recipe):
    """Dropout noise. It is drawn once and kept as one bit per element.

    The first two steps, which allocate and draw, never rerun; those that scale do.
    """

    __slots__ = ("_bits", "_dtype", "_size", "_stride")

    def __init__(self, noise: torch.Tensor, path: str) -> None:
        super().__init__(NEVER, path)
        self._dtype, self._size, self._stride = noise.dtype, noise.size(), noise.stride()
        self._bits: torch.Tensor | None = None

    @property
    def is_drawn(self) -> bool:
        """True once the noise has been drawn."""
        return len(self.steps) >= _DRAWN

    def keep(self, noise: torch.Tensor) -> None:
        """Keep the drawn values as bits. `noise` is a view of them."""
        if self._bits is None:
            with as_first():
                self._bits = packed(torch.as_strided(noise, self._size, self._stride, 0))

    def _run(self) -> torch.Tensor:
        assert self._bits is not None
        flat = unpacked(self._bits, self._dtype)
        return _written(torch.as_strided(flat, self._size, self._stride), self.steps[_DRAWN:])


_NODES = frozenset(CONJUGATING.values())


def _conjugated(value: torch.Tensor) -> torch.Tensor:
    """Return a new complex tensor as the conjugate of its conjugate, if autograd asks for it to conjugate it.

    Then autograd reads the memory as it is; else its products would copy the whole tensor to conjugate it.
    """
    node = torch._C._current_autograd_node() if value.is_complex() else None
    if node is None or node.name() not in _NODES:
        return value
    return value.conj_physical_().conj()


def _written(value: torch.Tensor, steps: Iterable[RecipeStep]) -> torch.Tensor:
    for step in steps:
        step.func(*filled(step.args, value), **filled(step.kwargs))
    return value


def _never() -> None:
    raise AssertionError("a pinned value is never recomputed")


_DRAWN = 2  # The steps that allocate and draw.
NEVER = RecipeStep(_never, (), {})
"""A step that must not rerun."""


def _lost() -> None:
    raise ApplyFailed(
        "backward runs through a graph that no step ran backward through when the plan was made, and what "
        "its saved tensors are computed from has changed since. The run stops before a gradient is wrong. "
        "Remove this place, of `replay` with `unread`, from the plan, or plan again from a step that does so."
    )


_LOST = RecipeStep(_lost, (), {})


@contextlib.contextmanager
def as_first() -> Iterator[None]:
    """Run operators as in forward: below autograd and autocast, which have already acted."""
    with (
        torch._C._AutoDispatchBelowAutograd(),
        torch._C._DisableAutocast(),
        torch._C.DisableTorchFunctionSubclass(),
        torch.enable_grad(),
    ):
        yield


def filled(value: Any, itself: torch.Tensor | None = None) -> Any:
    """Substitute the tensors in recorded arguments."""
    if value is SELF:
        return itself
    if isinstance(value, KeptTensor):
        return value.read()
    if isinstance(value, RecipeView):
        return value.get()
    if type(value) in (list, tuple):
        return type(value)(filled(one, itself) for one in value)
    if type(value) is dict:
        return {key: filled(one, itself) for key, one in value.items()}
    return value


def recorded_among(value: Any) -> Iterator[KeptTensor | RecipeView]:
    """Yield the recorded tensors among arguments."""
    if isinstance(value, (KeptTensor, RecipeView)):
        yield value
    elif type(value) in (list, tuple):
        for one in value:
            yield from recorded_among(one)
    elif type(value) is dict:
        yield from recorded_among(tuple(value.values()))


_STATISTICS, _TRAINS = 3, 5
"""Indices of the running statistics and of `training` among the arguments of `native_batch_norm`."""
_TYPES = tuple(getattr(torch, name) for name in TYPES)


def without_writes(args: Sequence[Any]) -> tuple[Any, ...]:
    """Return arguments that keep a training batch norm from updating its running statistics.

    The dtype of the statistics can select the kernel's compute type, so substitutes of the same type are
    passed.
    """
    if not args[_TRAINS]:
        return tuple(args)
    x, weight, bias, *running = args[:_TRAINS]
    others: list[Any] = [None, None]
    if weight is None and bias is None:
        with unnumbered():
            others = [
                None if one is None or one.dtype == x.dtype else torch.ones_like(one)
                for one in running
            ]
    return (*args[:_STATISTICS], *others, *args[_TRAINS:])


def with_statistics(
    step: RecipeStep, args: Sequence[Any], result: Sequence[torch.Tensor]
) -> RecipeStep:
    """Return a step that reuses the result's statistics if that is exact, else the step itself."""
    mean, inverse = result[1:3]
    x, *channels = (one for one in args[:_TRAINS] if one is not None)
    # Exact if the kernel for dense inputs runs, in a single dtype.
    exact = (
        args[_TRAINS]
        and all(one.is_contiguous() and one.dtype == x.dtype for one in channels)
        and mean.dtype == x.dtype
        and is_dense(tuple(x.shape), x.stride())
        and (x.dtype in _TYPES and x.device.type == "cpu")
    )
    if not exact:
        return step
    kept = KeptTensor(mean), KeptTensor(inverse)
    return RecipeStep(_normalized, (*step.args[:_STATISTICS], *kept), {})


def _normalized(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor,
    inverse: torch.Tensor,
) -> torch.Tensor:
    scale = inverse if weight is None else inverse * weight
    ones = torch.ones_like(mean)
    norm = torch.ops.aten.native_batch_norm.default
    result: torch.Tensor = norm(x, scale, bias, mean, ones, False, 0.0, 0.0)[0]
    return result
