"""Views of logits, as operations on the hidden states."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple

from torch import Tensor


class MovedHidden(NamedTuple):
    """Hidden states whose dimension `dim` becomes the `classes`, a slice or all, of logits by `weight`."""

    hidden: Tensor
    weight: Tensor
    dim: int
    classes: slice | None = None

    @property
    def width(self) -> int:
        """Width of the hidden states."""
        return self.hidden.shape[self.dim]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the logits."""
        return _with(self.hidden.shape, self.dim, len(self.weight))


Move = Callable[..., MovedHidden | None]


def _with(shape: Sequence[int], dim: int, size: int) -> tuple[int, ...]:
    return (*shape[:dim], size, *shape[dim + 1 :])


def _sizes(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...] | None:
    given: Any = args or tuple(kwargs.get(name, ()) for name in ("size", "shape") if name in kwargs)
    if len(given) == 1 and isinstance(given[0], (tuple, list)):
        given = given[0]
    return tuple(given) if given and all(isinstance(size, int) for size in given) else None


def _view(moved: MovedHidden, *args: Any, **kwargs: Any) -> MovedHidden | None:
    shape = _sizes(args, kwargs)
    return None if shape is None else _reshaped(moved, shape)


def _reshaped(moved: MovedHidden, shape: tuple[int, ...]) -> MovedHidden | None:
    """Reshape, if the classes remain a separate dimension."""
    count = prod(moved.shape)
    if -1 in shape:
        rest = prod(size for size in shape if size != -1)
        if shape.count(-1) > 1 or not rest or count % rest:
            return None
        shape = tuple(count // rest if size == -1 else size for size in shape)
    if prod(shape) != count:
        return None
    before, classes = prod(moved.shape[: moved.dim]), len(moved.weight)
    at = [i for i, n in enumerate(shape) if n == classes and prod(shape[:i]) == before]
    if not at:
        return None
    hidden = moved.hidden.reshape(_with(shape, at[-1], moved.width))
    return moved._replace(hidden=hidden, dim=at[-1])


def _view_as(moved: MovedHidden, other: Tensor) -> MovedHidden | None:
    return _reshaped(moved, tuple(other.shape))


def _flatten(moved: MovedHidden, start_dim: int = 0, end_dim: int = -1) -> MovedHidden | None:
    shape, count = moved.shape, len(moved.shape)
    first, last = start_dim % count, end_dim % count
    return _reshaped(moved, (*shape[:first], prod(shape[first : last + 1]), *shape[last + 1 :]))


def _unsqueeze(moved: MovedHidden, dim: int) -> MovedHidden:
    at = dim % (moved.hidden.dim() + 1)
    return moved._replace(hidden=moved.hidden.unsqueeze(at), dim=moved.dim + (at <= moved.dim))


def _squeeze(moved: MovedHidden, dim: int) -> MovedHidden | None:
    if not isinstance(dim, int) or dim % moved.hidden.dim() == moved.dim:
        return None
    at = dim % moved.hidden.dim()
    shrinks = moved.hidden.shape[at] == 1
    return moved._replace(
        hidden=moved.hidden.squeeze(at), dim=moved.dim - (shrinks and at < moved.dim)
    )


def _transpose(moved: MovedHidden, dim0: int, dim1: int) -> MovedHidden:
    count = moved.hidden.dim()
    order = list(range(count))
    order[dim0 % count], order[dim1 % count] = order[dim1 % count], order[dim0 % count]
    return _ordered(moved, order)


def _permute(moved: MovedHidden, *args: Any, **kwargs: Any) -> MovedHidden | None:
    given = args or (kwargs["dims"],)
    order = given[0] if len(given) == 1 and isinstance(given[0], (tuple, list)) else given
    return _ordered(moved, [dim % moved.hidden.dim() for dim in order])


def _ordered(moved: MovedHidden, order: list[int]) -> MovedHidden:
    return moved._replace(hidden=moved.hidden.permute(order), dim=order.index(moved.dim))


def _detach(moved: MovedHidden) -> MovedHidden:
    return moved._replace(hidden=moved.hidden.detach(), weight=moved.weight.detach())


def _getitem(moved: MovedHidden, index: Any) -> MovedHidden | None:
    """Select rows, and at most one range of classes if they are the last dimension."""
    parts = index if isinstance(index, tuple) else (index,)
    count = moved.hidden.dim()
    if moved.dim != count - 1 or any(not _is_plain(part) for part in parts):
        return None
    taken = sum(part is not None and part is not Ellipsis for part in parts)
    filled = _filled(parts, count - taken)
    last, dims = filled[-1], [part for part in filled if part is not None]
    if last is None or len(dims) != count or not isinstance(last, slice):
        return None
    hidden = moved.hidden[(*filled[:-1], slice(None))]
    made = moved._replace(hidden=hidden, dim=hidden.dim() - 1)
    if last == slice(None):
        return made
    return made._replace(weight=moved.weight[last], classes=last)


def _is_plain(part: Any) -> bool:
    return part is None or part is Ellipsis or isinstance(part, (int, slice)) or _is_list(part)


def _is_list(part: Any) -> bool:
    return isinstance(part, list) and bool(part) and all(type(place) is int for place in part)


def _filled(parts: tuple[Any, ...], missing: int) -> tuple[Any, ...]:
    """Replace an ellipsis, or extend the end, by full slices."""
    at = next((i for i, part in enumerate(parts) if part is Ellipsis), len(parts))
    return (*parts[:at], *[slice(None)] * missing, *parts[at + 1 :])


MOVES: dict[str, Move] = {
    "view": _view,
    "reshape": _view,
    "view_as": _view_as,
    "reshape_as": _view_as,
    "flatten": _flatten,
    "unsqueeze": _unsqueeze,
    "squeeze": _squeeze,
    "transpose": _transpose,
    "swapaxes": _transpose,
    "permute": _permute,
    "__getitem__": _getitem,
    "detach": _detach,
}
