"""Rows about copies between the host and the device."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from torchtrim.syncs.base import (
    TT101,
    TT103,
    Ask,
    filled,
    is_dense,
    native,
    on_device,
    on_host,
    pytorch,
)

_BLOCKING = native("cuda/Copy.cu", 488, "a blocking copy ends with a sync")
_QUEUED = native("cuda/Copy.cu", 468, "a non-blocking copy is only queued, if memory is pinned")
_TEMPORARY = native(
    "cuda/Copy.cu", 370, "a tensor that is not contiguous goes through a temporary one"
)
_SPARSE = native("TensorConversions.cpp", 270, "a sparse tensor is copied in its parts")
_PARTS = {
    "torch.sparse_coo": 2,
    "torch.sparse_csr": 3,
    "torch.sparse_csc": 3,
    "torch.sparse_bsr": 3,
    "torch.sparse_bsc": 3,
}
_INTO = ("aten::copy_", "aten::copy", "aten::_foreach_copy_")


def _pairs(ask: Ask) -> Iterator[tuple[Any, Any]]:
    target, source = ask.args["self"], ask.args["src"]
    if isinstance(target, (list, tuple)):
        yield from zip(target, source, strict=True)
    else:
        yield target, source


def _new_place(ask: Ask) -> str:
    """Return the device type of `_to_copy`'s result, or an empty string if it is the input's."""
    return str(ask.args.get("device") or "").partition(":")[0]


def _waits_for(ask: Ask, host: Any) -> bool:
    """Return True if a copy with this host tensor on one side blocks."""
    straight = ask.is_pinned(host) and host.is_contiguous()
    return not ask.args.get("non_blocking") or not straight


def _parts(tensor: Any) -> int:
    return _PARTS.get(str(getattr(tensor, "layout", "")), 1)


def _to_host(ask: Ask) -> int:
    source = ask.args["self"]
    leaves = on_device(ask, source) and _new_place(ask) == "cpu"
    waits = leaves and bool(source.numel()) and not ask.args.get("non_blocking")
    return _parts(source) if waits else 0


def _into(ask: Ask, *, host: bool) -> int:
    """Count the copies into tensors on the host, or on the device, that block."""
    return sum(
        on_host(ask, here)
        and on_device(ask, there)
        and bool(target.numel())
        and _waits_for(ask, here)
        for target, source in _pairs(ask)
        for here, there in [(target, source) if host else (source, target)]
    )


def _arrives(ask: Ask) -> bool:
    source = ask.args["self"]
    return on_host(ask, source) and _new_place(ask) == "cuda" and bool(source.numel())


def _stays_pinned(ask: Ask) -> bool:
    source, dtype = ask.args["self"], ask.args.get("dtype")
    same = dtype is None or str(dtype) == str(source.dtype)
    return ask.is_pinned(source) and (source.is_contiguous() or (same and is_dense(source)))


def _upload(ask: Ask) -> int:
    waits = _arrives(ask) and not ask.args.get("non_blocking")
    return _parts(ask.args["self"]) if waits else 0


def _pageable(ask: Ask) -> int:
    late = bool(ask.args.get("non_blocking"))
    return int(_arrives(ask) and late and not _stays_pinned(ask))


ROWS = (
    TT101(
        name="copy-to-host",
        what="`.cpu()`, `.to('cpu')`, `.tolist()`, `.numpy()`, `torch.save`",
        when="the tensor is on the device and not empty, and the copy is not `non_blocking`; with it the "
        "result is pinned and must not be read before an event or a synchronize",
        operators=("aten::_to_copy",),
        waits=_to_host,
        evidence=(
            _BLOCKING,
            native(
                "TensorConversions.cpp",
                346,
                "the result of a non-blocking copy to the host is pinned",
            ),
            _SPARSE,
        ),
        advice="Copy less often: stack the values, and read them once.",
    ),
    TT101(
        name="copy-into-host",
        what="`host.copy_(device)`, `host[i] = device`",
        when="the source is on the device, unless the target is pinned and contiguous and the copy is "
        "`non_blocking`",
        operators=_INTO,
        waits=partial(_into, host=True),
        evidence=(_BLOCKING, _QUEUED, _TEMPORARY),
        advice="A pinned target, `non_blocking=True`, and an event before it is read.",
    ),
    TT103(
        name="upload",
        what="`.cuda()`, `.to('cuda')`, `as_tensor(array, device='cuda')`",
        when="the tensor is on the host, pinned or not, and the copy is not `non_blocking`; for a sparse "
        "tensor once for its indices and once for its values",
        operators=("aten::_to_copy",),
        waits=_upload,
        evidence=(_BLOCKING, _SPARSE),
        advice="Once, ahead of the loop (`register_buffer`); for input, pinned memory and "
        "`non_blocking=True`; create constants on the device with `torch.full`.",
    ),
    TT103(
        name="upload-pageable",
        what="`.to('cuda', non_blocking=True)` from memory that is not pinned",
        when="the memory is pageable, or the tensor is not dense, so that torch makes a pageable copy; "
        "the driver reads all of it before the call returns",
        operators=("aten::_to_copy",),
        waits=_pageable,
        evidence=(_QUEUED, _TEMPORARY),
        advice="`pin_memory=True` in the DataLoader, or `.pin_memory()` ahead of the loop.",
    ),
    TT103(
        name="copy-into-device",
        what="`device.copy_(host)`, `device[a:b] = host`, and `device[i] = 3.0` for a single element",
        when="the source is on the host, unless it is pinned and contiguous and the copy is `non_blocking`",
        operators=_INTO,
        waits=partial(_into, host=False),
        evidence=(
            _BLOCKING,
            _QUEUED,
            pytorch("aten/src/ATen/TensorIndexing.h", 425, "a number is copied into one element"),
            pytorch(
                "aten/src/ATen/TensorIndexing.h", 428, "more elements are filled, which is free"
            ),
        ),
        advice="Pinned memory and `non_blocking=True`; for one element `x[i].fill_(3.0)`.",
    ),
    TT103(
        name="new-tensor",
        what="`torch.tensor(data, device='cuda')`",
        when="the data are not empty: they go through pageable host memory",
        operators=("aten::lift_fresh",),
        waits=filled("self"),
        evidence=(
            pytorch(
                "torch/csrc/utils/tensor_new.cpp",
                465,
                "built on the host, then copied, which blocks",
            ),
            _BLOCKING,
        ),
        advice="`torch.full`, `zeros` or `arange` with `device=`; or once, ahead of the loop.",
    ),
)
