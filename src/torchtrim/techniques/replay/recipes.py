"""Recipes: how a tensor was made, from which it is made again."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from torchtrim.executor.failing import note
from torchtrim.executor.saved_tensor_hooks import when_asked
from torchtrim.techniques.replay.bits import packed, unpacked

SELF = object()
"""Stands among the arguments of an operator that writes in place for the tensor that it writes."""


class Kept:
    """A tensor that is kept, and whether it is still what it was."""

    __slots__ = ("_version", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self._version = version_of(tensor)

    def get(self) -> torch.Tensor:
        """The tensor. Raises `RuntimeError` if it was written to since."""
        tensor = self.tensor
        if version_of(tensor) == self._version:
            return tensor
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: a tensor of shape {list(tensor.shape)} is at version {version_of(tensor)}; "
            f"expected version {self._version} instead."
        )


class Part(NamedTuple):
    """A view of what a recipe makes, as operator or autograd saw it. `steps`: of the recipe, until then."""

    recipe: Recipe
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    steps: int

    def get(self) -> torch.Tensor:
        """The view, of the tensor made again."""
        return self.recipe.view(self)


class Saved:
    """What autograd keeps in place of a tensor. It is asked for once, unless the graph is retained."""

    __slots__ = ("_part", "_waits")

    def __init__(self, part: Part) -> None:
        self._part = part
        self._waits = True
        part.recipe.users += 1

    def get(self) -> torch.Tensor:
        """The tensor, made again."""
        try:
            return self._part.get()
        finally:
            if self._waits:
                self._waits = False
                when_asked(self._part.recipe.leave)

    def __del__(self) -> None:
        if self._waits:
            self._part.recipe.leave()


class Step(NamedTuple):
    """An operator that ran. Among its arguments are `Kept`, `Part` and `SELF`."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Recipe:
    """How one storage was made: an operator that allocated it, and others that wrote to it in place.

    `users` are those that will ask for it: what autograd saved, and recipes that are made from it. Once made
    again it is kept until the last of them has asked.
    """

    __slots__ = ("_owes", "_value", "path", "pinned", "steps", "users")

    def __init__(self, step: Step, path: str) -> None:
        self.steps = [step]
        self.path = path
        self.users = 0
        self.pinned = False
        self._value: torch.Tensor | None = None
        self._owes: list[Recipe] = []
        self._owe(step)

    def add(self, step: Step) -> None:
        """An operator has written to it."""
        self.steps.append(step)
        self._owe(step)

    def _owe(self, step: Step) -> None:
        """It will ask for what a step is made from once."""
        for part in parts_among(step.args):
            part.recipe.users += 1
            self._owes.append(part.recipe)

    def _settle(self) -> None:
        while self._owes:
            self._owes.pop().leave()

    def __del__(self) -> None:
        self._settle()

    def view(self, part: Part) -> torch.Tensor:
        """A view of what is made."""
        if part.steps != len(self.steps):
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace "
                "operation after it was saved."
            )
        value = self._again()
        if (part.size, part.stride, part.offset) == _geometry(value):
            return value
        return torch.as_strided(value, part.size, part.stride, part.offset)

    def leave(self) -> None:
        """One that would ask for it has, or never will."""
        self.users -= 1
        if self.users <= 0 and not self.pinned:
            self._value = None

    def pin(self) -> None:
        """Make it now and keep it: what it is made from is about to change."""
        self._value = self._again()
        self.pinned = True
        self.steps = [NEVER for _ in self.steps]

    def _again(self) -> torch.Tensor:
        if self._value is not None:
            return self._value
        try:
            with as_first():
                value = self._run()
        except Exception as error:
            note(error, self.path)
            raise
        if self.users > 0:
            self._value = value
        return value

    def _run(self) -> torch.Tensor:
        first, *writes = self.steps
        made = first.func(*filled(first.args), **filled(first.kwargs))
        value: torch.Tensor = made[0] if isinstance(made, (tuple, list)) else made
        for step in writes:
            step.func(*filled(step.args, value), **filled(step.kwargs))
        self._settle()
        return value


class Noise(Recipe):
    """Noise of dropout. It is drawn once; what is kept of it is a bit for each element.

    Its first two steps, which allocate and draw, never run again; those that scale it do.
    """

    __slots__ = ("_bits", "_dtype", "_size", "_stride")

    def __init__(self, noise: torch.Tensor, path: str) -> None:
        super().__init__(NEVER, path)
        self._dtype, self._size, self._stride = noise.dtype, noise.size(), noise.stride()
        self._bits: torch.Tensor | None = None

    @property
    def is_drawn(self) -> bool:
        """Whether it has its values."""
        return len(self.steps) >= _DRAWN

    def keep(self, noise: torch.Tensor) -> None:
        """Keep the bits of what was drawn; `noise` is a view of it."""
        if self._bits is None:
            with as_first():
                self._bits = packed(torch.as_strided(noise, self._size, self._stride, 0))

    def _run(self) -> torch.Tensor:
        assert self._bits is not None
        flat = unpacked(self._bits, self._dtype)
        value = torch.as_strided(flat, self._size, self._stride)
        for step in self.steps[_DRAWN:]:
            step.func(*filled(step.args, value), **filled(step.kwargs))
        return value


def _never() -> None:
    raise AssertionError("a pinned value is never made again")


_DRAWN = 2
NEVER = Step(_never, (), {})
"""A step that is not to run again."""


@contextlib.contextmanager
def as_first() -> Iterator[None]:
    """As operators ran at first: below autograd and autocast, which have done their part."""
    with (
        torch._C._AutoDispatchBelowAutograd(),
        torch._C._DisableAutocast(),
        torch._C.DisableTorchFunctionSubclass(),
        torch.enable_grad(),
    ):
        yield


def filled(value: Any, itself: torch.Tensor | None = None) -> Any:
    """Arguments with the tensors in their places."""
    if value is SELF:
        return itself
    if isinstance(value, (Kept, Part)):
        return value.get()
    if type(value) in (list, tuple):
        return type(value)(filled(one, itself) for one in value)
    if type(value) is dict:
        return {key: filled(one, itself) for key, one in value.items()}
    return value


def parts_among(value: Any) -> Iterator[Part]:
    """The parts of recipes among arguments."""
    if isinstance(value, Part):
        yield value
    elif type(value) in (list, tuple):
        for one in value:
            yield from parts_among(one)


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor was written to; -1 where that is not counted."""
    return -1 if tensor.is_inference() else tensor._version


def _geometry(tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    return tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())
