"""Operators with data-dependent results: computed if the data is known, else bounded from above."""

from __future__ import annotations

import linecache
import math
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_map_only

from torchtrim.dispatch.modes import tensors_among
from torchtrim.dryrun.oracle import Geometry, is_small
from torchtrim.emulator.recurrent import MODES, reserve_bytes

if TYPE_CHECKING:
    from torchtrim.dryrun.mode import Dry

Bound = Callable[["Dry", Any, Any, dict[str, Any], bool], Any]
_aten = torch.ops.aten
_LONG = torch.int64
_PAGE, _LINE, _ALIASES, _FLOAT = 4096, 16, 256, 4
"""oneDNN's LSTM: src/cpu/rnn/rnn_utils.cpp of oneapi-src/oneDNN (`get_good_ld`, `set_workspace_sizes`)."""

UNTOUCHED = frozenset(
    (
        "aten::_unsafe_view",
        "aten::unsafe_split",
        "aten::unsafe_split_with_sizes",
        "aten::unsafe_chunk",
        "aten::is_pinned",
        "aten::_has_compatible_shallow_copy_type",
        "aten::is_same_size",
        "aten::set_data",
        "aten::retain_grad",
        "aten::_fused_sdp_choice",
        "aten::_version",
        "aten::is_set_to",
    )
)
"""Operators that read no elements, although their schema does not say so."""


def _dense(dry: Dry, shape: Sequence[int], dtype: torch.dtype = _LONG) -> Any:
    strides = torch.empty(tuple(shape), device="meta").stride()
    return dry.blank(Geometry(tuple(shape), strides, dtype))


def _scalar(dry: Dry, func: Any, args: Any, kwargs: Any, known: bool) -> Any:
    """`item()`: the number if it is known. Otherwise conditions get False, counts 0 and floats 1."""
    if known:
        return func(*args, **kwargs)
    kind = args[0].dtype
    if kind is torch.bool:
        if _asks_for_curvature():
            return True
        dry.guesses.add("a condition depends on computed values; taken as false")
        return False
    if kind.is_complex:
        return complex(1.0)
    if kind.is_floating_point:
        return 1.0
    dry.guesses.add("a number is read from computed values; taken as 0")
    return 0


def _asks_for_curvature() -> bool:
    """Return True where LBFGS asks if a pair of its history is curved, as it is in nearly every step.

    Modes and the dispatcher may stand between: nothing else asks while that line runs.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") != "torch.optim.lbfgs":
        frame = frame.f_back
    return frame is not None and "ys >" in linecache.getline(
        frame.f_code.co_filename, frame.f_lineno
    )


def _false(dry: Dry, func: Any, args: Any, kwargs: Any, known: bool) -> Any:
    if known:
        return func(*args, **kwargs)
    dry.guesses.add("a comparison depends on computed values; taken as false")
    return False


def _all_finite(dry: Dry, func: Any, args: Any, kwargs: dict[str, Any], known: bool) -> None:
    """Unscale gradients, and find them finite: a step that a scaler skips is none that trains."""
    dry.forget(args[0])
    args[1].zero_()


def _nothing(dry: Dry, func: Any, args: Any, kwargs: Any, known: bool) -> Any:
    return None


def _nonzero(dry: Dry, func: Any, args: Any, kwargs: Any, known: bool) -> Any:
    tensor = args[0]
    if known:
        return dry.real(func, args, kwargs)
    count = _bounded(dry, "nonzero", tensor.numel())
    return dry.blank(Geometry((count, tensor.dim()), (1, max(count, 1)), _LONG))


def _masked_select(dry: Dry, func: Any, args: Any, kwargs: Any, known: bool) -> Any:
    tensor, mask = args[:2]
    broadcast: Any = torch.functional.broadcast_shapes
    shape = broadcast(tensor.shape, mask.shape)
    if dry.knows(mask):
        return _dense(dry, (int(mask.expand(shape).sum()),), tensor.dtype)
    return _dense(dry, (_bounded(dry, "masked_select", math.prod(shape)),), tensor.dtype)


def _index(dry: Dry, func: Any, args: Any, kwargs: Any, known: bool) -> Any:
    """Expand each boolean mask to integer indices: one per true element, or per element if unknown."""
    tensor, indices, *rest = args
    if not any(map(_is_mask, indices)):
        return dry.general(func, args, kwargs, known)
    if known and is_small([tensor, *(one for one in indices if one is not None)]):
        return dry.real(func, args, kwargs)
    return dry.general(func, (tensor, _plain(dry, indices), *rest), kwargs, False)


def _index_put(dry: Dry, func: Any, args: Any, kwargs: Any, known: bool) -> Any:
    if not _fills(*args):
        _plain(dry, args[1])
    return dry.general(func, args, kwargs, known)


def _fills(_: Any, indices: Any, value: Any, accumulate: bool = False, *rest: Any) -> bool:
    """Return True if torch fills the elements of one mask in place (`canDispatchToMaskedFill`)."""
    given = [index for index in indices if index is not None]
    return not accumulate and value.numel() == 1 and len(given) == 1 and _is_mask(given[0])


def _plain(dry: Dry, indices: Any) -> list[Any]:
    """Return the indices as integers. The kernel allocates a table of the elements that masks select."""
    plain: list[Any] = []
    scratch = 0
    for index in indices:
        if not _is_mask(index):
            plain.append(index)
            continue
        if dry.knows(index):
            count = int(index.count_nonzero())
        else:
            count = _bounded(dry, "a boolean index", index.numel())
        numbers = [_dense(dry, (count,)) for _ in range(max(index.dim(), 1))]
        scratch += sum(one.nbytes for one in numbers)
        plain += numbers
    dry.need(scratch)
    return plain


def _is_mask(index: Any) -> bool:
    return index is not None and index.dtype in (torch.bool, torch.uint8)


def _unique(dry: Dry, func: Any, args: Any, kwargs: Any, known: bool) -> Any:
    """`unique` in all its forms; unknown elements count as all different."""
    tensor = args[0]
    if known:
        return dry.real(func, args, kwargs)
    dim = _argument(func, args, kwargs, "dim")
    count = _bounded(dry, "unique", tensor.numel() if dim is None else tensor.shape[dim])
    shape, inverse = (count,), tuple(tensor.shape)
    if dim is not None:
        shape, inverse = inverse, shape
    if _argument(func, args, kwargs, "return_inverse") is False:
        inverse = (0,)
    counts = (count if _argument(func, args, kwargs, "return_counts") else 0,)
    results = _dense(dry, shape, tensor.dtype), _dense(dry, inverse), _dense(dry, counts)
    return results[: len(func._schema.returns)]


def _repeat_interleave(dry: Dry, func: Any, args: Any, kwargs: Any, known: bool) -> Any:
    size = _argument(func, args, kwargs, "output_size")
    if size is None:
        if dry.knows(args[0]):
            size = int(args[0].sum())
        else:
            size = _bounded(dry, "repeat_interleave", args[0].numel(), "its input's length")
    return _dense(dry, (size,), args[0].dtype)


def _bincount(dry: Dry, func: Any, args: Any, kwargs: Any, known: bool) -> Any:
    least = _argument(func, args, kwargs, "minlength") or 0
    if dry.knows(args[0]):
        size = max(int(args[0].max()) + 1 if args[0].numel() else 0, least)
    else:
        most = "its minlength" if least else "its input's length"
        size = _bounded(dry, "bincount", least or args[0].numel(), most)
    weights = _argument(func, args, kwargs, "weights")
    return _dense(dry, (size,), _LONG if weights is None else weights.dtype)


def _pack(dry: Dry, func: Any, args: Any, kwargs: Any, known: bool) -> Any:
    """`pack_padded_sequence`: the number of rows is the sum of the lengths."""
    padded, lengths, first = args
    steps, batch = (padded.shape[1], padded.shape[0]) if first else tuple(padded.shape[:2])
    if dry.knows(lengths):
        every = lengths.tolist()
        counts = [sum(one > step for one in every) for step in range(max(every))]
        sizes = torch.tensor(counts, device="cpu")
    else:
        _bounded(dry, "pack_padded_sequence", steps * batch)
        sizes = torch.full((steps,), batch, dtype=torch.int64, device="cpu")
    return _dense(dry, (int(sizes.sum()), *padded.shape[2:]), padded.dtype), sizes


def _nms(dry: Dry, func: Any, args: Any, kwargs: Any, known: bool) -> Any:
    return _dense(dry, (_bounded(dry, "nms", args[0].shape[0]),))


def _recurrent(dry: Dry, func: Any, args: Any, kwargs: Any, known: bool) -> Any:
    """An LSTM on the CPU also returns its workspace for backward, which fake tensors leave out."""
    results = list(dry.general(func, args, kwargs, False))
    results[3] = _dense(dry, (_lstm_bytes(args),), torch.uint8)
    return tuple(results)


def _cudnn_recurrent(dry: Dry, func: Any, args: Any, kwargs: Any, known: bool) -> Any:
    """cuDNN's reserve, which fake tensors leave out."""
    out, hidden, cell, *_ = dry.general(func, args, kwargs, False)
    mode, size, layers, trains, both = args[6], args[7], args[9], args[12], args[13]
    directions = layers * (1 + both)
    kept = reserve_bytes(MODES[mode], out, size, directions) if trains else 0
    empty = _dense(dry, (0,), out.dtype)
    return out, hidden, cell, _dense(dry, (kept,), torch.uint8), empty


def _cudnn_recurrent_backward(dry: Dry, func: Any, args: Any, kwargs: Any, known: bool) -> Any:
    tensor, weights, hidden, cell = args[0], args[1], args[4], args[5]
    made = [
        None if one is None else _dense(dry, tuple(one.shape), one.dtype)
        for one in (tensor, hidden, cell, *weights)
    ]
    return *made[:3], made[3:]


def _lstm_bytes(args: Any) -> int:
    """Return the bytes an LSTM saves for backward; 0 if gradients are off.

    Gates, hidden and cell states and their gradients, each aligned to a page.
    """
    if not torch.is_grad_enabled():
        return 0
    (steps, samples, inputs), hidden = args[0].shape, args[2].shape[1]
    wide = _leading(max(inputs, hidden))
    gates = _pages(steps * samples * _leading(4 * hidden))
    states = _pages(2 * (steps + 1) * samples * wide)
    cells = _pages(2 * (steps + 1) * samples * hidden)
    return gates + 3 * states + 2 * cells + _pages(steps * samples * _leading(hidden))


def _leading(length: int) -> int:
    """Return the row stride in elements: whole cache lines, padded if rows would share cache sets."""
    lines = -(-length // _LINE) * _LINE
    return lines + _LINE if lines % _ALIASES == 0 else lines


def _pages(elements: int) -> int:
    return -(-elements * _FLOAT // _PAGE) * _PAGE


def _reduced_loss(dry: Dry, func: Any, args: Any, kwargs: Any, known: bool) -> Any:
    """A loss reduced in place: the resulting scalar keeps the memory of all its elements."""
    result, x = dry.general(func, args, kwargs, known), args[0]
    if dry.knows(result) or result.dim() == x.dim():
        return result
    return _dense(dry, (max(x.numel(), 1),), result.dtype).as_strided((), ())


def _resize(dry: Dry, func: Any, args: Any, kwargs: Any, known: bool) -> Any:
    """A meta tensor cannot grow in place, so it gets another storage."""
    tensor, size = args[0], tuple(args[1])
    strides = torch.empty(size, device="meta").stride()
    if math.prod(size) * tensor.itemsize <= tensor.untyped_storage().nbytes():
        return tensor.as_strided_(size, strides) if tuple(tensor.shape) != size else tensor
    return tensor.set_(_dense(dry, size, tensor.dtype).untyped_storage(), 0, size, strides)


def _sparse(dry: Dry, func: Any, args: Any, kwargs: Any, known: bool) -> Any:
    """A sparse tensor, whose operators run for real: the rows that they merge depend on its indices."""
    size, indices = (_argument(func, args, kwargs, name) for name in ("size", "indices"))
    if dry.blanks.holds(indices.data_ptr()):
        of = tuple(size[: indices.shape[0]])
        count = _bounded(dry, "a sparse gradient", min(indices.shape[1], math.prod(of)))
        rows = torch.arange(indices.shape[1], dtype=_LONG, device="cpu") % count
        indices.copy_(torch.stack(torch.unravel_index(rows, of)))
    return func(*args, **kwargs)


def _bounded(dry: Dry, what: str, count: int, most: str = "the most there can be") -> int:
    dry.guesses.add(f"the size of {what} depends on computed values; counted as {most}, {count}")
    return count


def _argument(func: Any, args: Any, kwargs: dict[str, Any], name: str) -> Any:
    for position, argument in enumerate(func._schema.arguments):
        if argument.name == name:
            passed = position < len(args)
            return args[position] if passed else kwargs.get(name, argument.default_value)
    return None


NAMESPACE = "c10d"
_CLONES_ITS_INPUT = "c10d::_reduce_scatter_base_"


def collective(dry: Dry, func: Any, args: Any, kwargs: dict[str, Any], known: bool) -> Any:
    """Run a collective on empty tensors and return its arguments unchanged.

    Gloo reduces a copy of its input (`ProcessGroupGloo::_reduce_scatter_base`). The scratch memory of other
    backends does not count.
    """
    tensors = [*tensors_among((*args, *kwargs.values()))]
    if known and is_small(tensors):
        return func(*args, **kwargs)
    dry.forget(tensors)
    if func.name() == _CLONES_ITS_INPUT:
        dry.need(args[1].nbytes)
    empty = {id(tensor): tensor.new_empty(0) for tensor in tensors}
    given, named = _exchanged((args, kwargs), empty)
    result = func(*given, **named)
    originals = {id(empty[id(tensor)]): tensor for tensor in tensors}
    return _exchanged(result, originals)


def gathered_into(dry: Dry, func: Any, args: Any, kwargs: dict[str, Any], known: bool) -> Any:
    """Return this rank's shard as a view of the gathered tensor, and the gathered tensor."""
    _, whole, _, length, rank = args
    dry.forget((whole,))
    return whole.narrow(0, length * rank, length), whole


def written_out(dry: Dry, func: Any, args: Any, kwargs: dict[str, Any], known: bool) -> None:
    """Mark the elements of `out` as unknown."""
    dry.forget(tensors_among((kwargs.get("out", args[-1]),)))


def _exchanged(value: Any, others: dict[int, Any]) -> Any:
    return tree_map_only(torch.Tensor, lambda tensor: others.get(id(tensor), tensor), value)


BOUNDS: dict[str, Bound] = {
    "aten::_local_scalar_dense": _scalar,
    "aten::equal": _false,
    "aten::_amp_foreach_non_finite_check_and_unscale_": _all_finite,
    "aten::_assert_async": _nothing,
    **dict.fromkeys(("aten::_assert_scalar", "aten::_assert_tensor_metadata"), _nothing),
    **dict.fromkeys(("aten::nonzero", "aten::argwhere"), _nonzero),
    "aten::masked_select": _masked_select,
    **dict.fromkeys(("aten::index", "aten::_unsafe_index"), _index),
    "aten::_index_put_impl_": _index_put,
    **dict.fromkeys(("aten::index_put", "aten::index_put_"), _index_put),
    **dict.fromkeys(("aten::_unique", "aten::_unique2", "aten::unique_dim"), _unique),
    **dict.fromkeys(("aten::unique_consecutive", "aten::unique_dim_consecutive"), _unique),
    "aten::repeat_interleave": _repeat_interleave,
    "aten::bincount": _bincount,
    "aten::_pack_padded_sequence": _pack,
    "aten::mkldnn_rnn_layer": _recurrent,
    "aten::_cudnn_rnn": _cudnn_recurrent,
    "aten::_cudnn_rnn_backward": _cudnn_recurrent_backward,
    "aten::resize_": _resize,
    "aten::_sparse_coo_tensor_with_dims_and_tensors": _sparse,
    **dict.fromkeys(("aten::mse_loss", "aten::smooth_l1_loss"), _reduced_loss),
    **dict.fromkeys(("aten::soft_margin_loss", "aten::binary_cross_entropy"), _reduced_loss),
    "torchvision::nms": _nms,
    "fsdp::all_gather_copy_in": gathered_into,
    "fsdp::split_with_sizes_copy": written_out,
    "fsdp::chunk_cat": written_out,
}
