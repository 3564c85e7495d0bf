"""For each row of the table that knows operators: arguments with which it waits, and with which not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from syncs.asked import Asked, schema_defaults
from torchtrim.syncs.lookup import holds, row

Case = tuple[Asked, int]

X = torch.arange(12.0).reshape(3, 4)
ROWS3 = torch.tensor([0, 2, 1])
MASK = X > 3
ROW_MASK = torch.tensor([True, False, True])
SCALAR = torch.tensor(3.0)
EMPTY = torch.empty(0)
HOST = torch.ones(3, 4)
SQUARE = torch.eye(3)
LOOSE = torch.sparse_coo_tensor(
    torch.tensor([[0, 1], [1, 2]]), torch.ones(2), (3, 3), check_invariants=False
)
MERGED = LOOSE.coalesce()
BITS = torch.tensor([1, 2], dtype=torch.uint8)
MANY = torch.arange(100)
STRIDED = torch.ones(4, 6)[:, ::2]


def ask(operator: str, *device: Tensor, pinned: tuple[Tensor, ...] = (), **args: Any) -> Asked:
    """An operator with these arguments, the others as its schema has them."""
    return Asked(operator, {**schema_defaults(operator), **args}, device, pinned)


def exists(operator: str) -> bool:
    """Whether this torch has the operator."""
    return hasattr(torch.ops.aten, operator.removeprefix("aten::").partition(".")[0])


def copied(source: Tensor, *device: Tensor, to: str, **more: Any) -> Asked:
    """`_to_copy` to a device."""
    return ask("aten::_to_copy", *device, self=source, device=torch.device(to), **more)


def into(target: Any, source: Any, *device: Tensor, **more: Any) -> Asked:
    """`copy_`, or `_foreach_copy_` for lists."""
    name = "aten::_foreach_copy_" if isinstance(target, list) else "aten::copy_"
    return ask(name, *device, self=target, src=source, **more)


def indexed(indices: list[Tensor | None], *device: Tensor) -> Asked:
    """`x[indices]`."""
    return ask("aten::index.Tensor", *device, self=X, indices=indices)


def put(indices: list[Tensor | None], values: Tensor, *device: Tensor, **more: Any) -> Asked:
    """`x[indices] = values`."""
    name = "aten::index_put_"
    return ask(name, *device, self=X, indices=indices, values=values, **more)


def _reads() -> dict[str, list[Case]]:
    return {
        "item": [
            (ask("aten::_local_scalar_dense", SCALAR, self=SCALAR), 1),
            (ask("aten::_local_scalar_dense", self=SCALAR), 0),
        ],
        "equal": [
            (ask("aten::equal", X, HOST, self=X, other=HOST), 1),
            (ask("aten::equal", X, self=X, other=X), 0),
            (ask("aten::equal", X, SCALAR, self=X, other=SCALAR), 0),
            (ask("aten::equal", self=X, other=HOST), 0),
        ],
        "allclose": [
            (ask("aten::allclose", X, HOST, self=X, other=HOST), 1),
            (ask("aten::allclose", self=X, other=HOST), 0),
        ],
        "fill-host": [
            (ask("aten::fill_.Tensor", SCALAR, self=HOST, value=SCALAR), 1),
            (ask("aten::fill_.Tensor", SCALAR, X, self=X, value=SCALAR), 0),
            (ask("aten::fill_.Tensor", X, self=X, value=SCALAR), 0),
        ],
        "masked-fill-value": [
            (ask("aten::masked_fill_.Tensor", X, MASK, SCALAR, self=X, mask=MASK, value=SCALAR), 1),
            (ask("aten::masked_fill.Tensor", X, MASK, self=X, mask=MASK, value=SCALAR), 0),
        ],
        "index-fill-value": [
            (ask("aten::index_fill_.int_Tensor", X, SCALAR, self=X, value=SCALAR), 1),
            (ask("aten::index_fill_.int_Tensor", X, self=X, value=SCALAR), 0),
        ],
        "range-bounds": [
            (ask("aten::linspace.Tensor_Tensor", SCALAR, start=SCALAR, end=SCALAR), 2),
            (ask("aten::linspace.Tensor_Scalar", SCALAR, start=SCALAR, end=5), 1),
            (ask("aten::logspace.Scalar_Tensor", start=0, end=SCALAR), 0),
        ],
        "histogram-range": [
            (ask("aten::histc", X, self=X), 2),
            (ask("aten::histc", X, self=X, min=0, max=1), 0),
            (ask("aten::histc", self=X), 0),
        ],
        "normal-std": [
            (ask("aten::normal.Tensor_Tensor", X, HOST, mean=X, std=HOST), 1),
            (ask("aten::normal.float_Tensor", X, std=X), 1),
            (ask("aten::normal.float_Tensor", EMPTY, std=EMPTY), 0),
        ],
        "long-mode": [
            (_mode(3000), 1),
            (_mode(2048), 0),
        ],
        "segment-lengths": [
            (ask("aten::segment_reduce", X, ROWS3, data=X, lengths=ROWS3), 2),
            (ask("aten::segment_reduce", X, ROWS3, data=X, lengths=ROWS3, unsafe=True), 0),
            (ask("aten::segment_reduce", X, ROWS3, data=X, offsets=ROWS3), 0),
        ],
        "fake-quant-switch": [
            (_observed(per_row_fake_quant=True), 1),
            (_observed(per_row_fake_quant=False), 0),
        ],
        "sorter-range": [
            (_sorted(ROWS3, ROWS3), 2),
            (_sorted(None), 0),
            (_sorted(EMPTY, EMPTY), 0),
        ],
        "padding-mask": [
            (ask("aten::_nested_tensor_from_mask_left_aligned", X, MASK, t=X, mask=MASK), 1),
            (ask("aten::_nested_tensor_from_mask", X, MASK, t=X, mask=MASK, mask_check=False), 1),
            (ask("aten::_nested_tensor_from_mask", X, MASK, t=X, mask=MASK), 2),
            (ask("aten::_nested_tensor_from_mask", t=X, mask=MASK), 0),
        ],
        "zero-points": [
            (ask("aten::quantize_per_channel", X, ROWS3, self=X, zero_points=ROWS3), 2),
            (ask("aten::quantize_per_channel", self=X, zero_points=ROWS3), 0),
        ],
    }


def _mode(length: int) -> Asked:
    values = torch.zeros(2, length)
    return ask("aten::mode", values, self=values)


def _sorted(sorter: Tensor | None, *device: Tensor) -> Asked:
    table = torch.arange(3.0)
    return ask("aten::searchsorted.Tensor", *(table, *device), sorted_sequence=table, sorter=sorter)


def _observed(**more: Any) -> Asked:
    return ask("aten::_fused_moving_avg_obs_fq_helper", X, self=X, **more)


def _algebra() -> dict[str, list[Case]]:
    def once(operator: str, name: str) -> list[Case]:
        waiting = ask(operator, SQUARE, **{name: SQUARE})
        return [(waiting, 1), (ask(operator, **{name: SQUARE}), 0)]

    complex_square = SQUARE.to(torch.complex64)
    small = torch.ones(1, 1)
    return {
        "linalg-check": once("aten::_linalg_check_errors", "info"),
        "linalg-check-errors": [
            (ask("aten::linalg_inv_ex", SQUARE, A=SQUARE, check_errors=True), 1),
            (ask("aten::linalg_inv_ex", SQUARE, A=SQUARE), 0),
            (ask("aten::linalg_cholesky_ex", SQUARE, self=SQUARE, check_errors=True), 1),
        ],
        **({"cholesky": once("aten::cholesky", "self")} if exists("aten::cholesky") else {}),
        "eigh": once("aten::_linalg_eigh", "A"),
        "svd": [
            (ask("aten::_linalg_svd", SQUARE, A=SQUARE), 2),
            (ask("aten::_linalg_svd", SQUARE, A=SQUARE, driver="gesvd"), 1),
            (ask("aten::_linalg_svd", A=SQUARE), 0),
        ],
        "eig": [
            (ask("aten::linalg_eig", SQUARE, self=SQUARE), 3),
            (ask("aten::linalg_eig", complex_square, self=complex_square), 2),
            (ask("aten::linalg_eig", self=SQUARE), 0),
        ],
        "lstsq": once("aten::linalg_lstsq", "self"),
        "ldl-solve": once("aten::linalg_ldl_solve", "LD"),
        "matrix-exp": [
            (ask("aten::linalg_matrix_exp", SQUARE, self=SQUARE), 2),
            (ask("aten::linalg_matrix_exp", small, self=small), 0),
        ],
    }


def _shapes() -> dict[str, list[Case]]:
    def once(operator: str, **args: Any) -> list[Case]:
        device = tuple(one for one in args.values() if isinstance(one, Tensor))
        return [(ask(operator, *device, **args), 1), (ask(operator, **args), 0)]

    repeat = "aten::repeat_interleave.Tensor"
    return {
        "nonzero": once("aten::nonzero", self=X),
        "mask-index": [
            (indexed([MASK], X, MASK), 1),
            (indexed([ROW_MASK, None], X, ROW_MASK), 1),
            (indexed([MASK], X), 0),
            (indexed([ROWS3], X, ROWS3), 0),
        ],
        "mask-assign": [
            (put([MASK], HOST, X, MASK, HOST), 1),
            (put([MASK], SCALAR, X, MASK, SCALAR), 1),
            (put([MASK], SCALAR, X, MASK, accumulate=True), 1),
            (put([ROW_MASK, ROWS3], SCALAR, X, ROW_MASK, ROWS3), 1),
            (put([MASK], SCALAR, X, MASK), 0),
            (put([None, ROW_MASK], SCALAR, X, ROW_MASK), 0),
            (put([MASK], HOST, X, HOST), 0),
        ],
        "masked-select": once("aten::masked_select", self=X, mask=MASK),
        "masked-scatter-backward": once("aten::masked_scatter_backward", grad_output=X, mask=MASK),
        "unique": [*once("aten::_unique2", self=X), (ask("aten::_unique2", EMPTY, self=EMPTY), 0)],
        "unique-dim": once("aten::unique_dim", self=X, dim=0),
        "repeat-interleave": [
            (ask(repeat, ROWS3, repeats=ROWS3), 2),
            (ask(repeat, ROWS3, repeats=ROWS3, output_size=3), 0),
            (ask(repeat, repeats=ROWS3), 0),
        ],
        "bincount": [
            (ask("aten::bincount", ROWS3, self=ROWS3, minlength=5), 2),
            (ask("aten::bincount", BITS, self=BITS), 1),
            (ask("aten::bincount", EMPTY, self=EMPTY), 0),
        ],
        "isin": [
            (_isin(MANY, MANY), 3),
            (_isin(MANY, MANY, assume_unique=True), 1),
            (_isin(MANY, ROWS3), 0),
            (ask("aten::isin.Scalar_Tensor", MANY, element=1, test_elements=MANY), 3),
        ],
        "grouped-matmul": [
            (_grouped(torch.float32), 1),
            (_grouped(torch.bfloat16), 0),
            (_grouped(torch.bfloat16, out_dtype=torch.float32), 1),
        ],
        "dense-to-jagged": [
            (ask("aten::_padded_dense_to_jagged_forward", X, dense=X), 1),
            (ask("aten::_padded_dense_to_jagged_forward", X, dense=X, total_L=3), 0),
        ],
        "coalesce": once("aten::_coalesce", self=X),
        "sparse-product": [
            (ask("aten::mm", LOOSE, SQUARE, self=LOOSE, mat2=SQUARE), 1),
            (ask("aten::_sparse_addmm", LOOSE, SQUARE, self=SQUARE, mat1=LOOSE, mat2=SQUARE), 1),
            (ask("aten::_sparse_sparse_matmul", LOOSE, self=LOOSE, other=LOOSE), 2),
            (ask("aten::mm", MERGED, SQUARE, self=MERGED, mat2=SQUARE), 0),
            (ask("aten::mm", SQUARE, self=SQUARE, mat2=SQUARE), 0),
            (ask("aten::mm", self=LOOSE, mat2=SQUARE), 0),
        ],
        "sparse-batch-product": [
            (ask("aten::bmm", LOOSE, X, self=LOOSE, mat2=X), 2),
            (ask("aten::bmm", MERGED, X, self=MERGED, mat2=X), 1),
            (ask("aten::bmm", X, X, self=X, mat2=X), 0),
            (ask("aten::bmm", X, self=LOOSE, mat2=X), 0),
        ],
        "sparse-sum": [
            (ask("aten::_sparse_sum.dim", MERGED, self=MERGED, dim=[-1]), 1),
            (ask("aten::_sparse_sum.dim", MERGED, self=MERGED, dim=[0, 1]), 0),
            (ask("aten::_sparse_sum.dim", self=MERGED, dim=[1]), 0),
        ],
        "to-sparse": [
            *once("aten::_to_sparse", self=X),
            (ask("aten::_to_sparse_csr", LOOSE, self=LOOSE), 1),
            (ask("aten::_to_sparse_csr", MERGED, self=MERGED), 0),
        ],
    }


def _grouped(dtype: torch.dtype, **more: Any) -> Asked:
    matrix = X.to(dtype)
    name = "aten::_grouped_mm"
    return ask(name, matrix, ROWS3, self=matrix, mat2=matrix, offs=ROWS3, **more)


def _isin(elements: Tensor, tested: Tensor, **more: Any) -> Asked:
    name = "aten::isin.Tensor_Tensor"
    return ask(name, elements, tested, elements=elements, test_elements=tested, **more)


def _copies() -> dict[str, list[Case]]:
    late = {"non_blocking": True}
    pinned = {"pinned": (HOST, STRIDED, HOST.t())}
    transposed = HOST.t()
    return {
        "copy-to-host": [
            (copied(X, X, to="cpu"), 1),
            (copied(LOOSE, LOOSE, to="cpu"), 2),
            (copied(X, X, to="cpu", **late), 0),
            (copied(EMPTY, EMPTY, to="cpu"), 0),
            (copied(X, X, to="cuda:0"), 0),
            (copied(X, to="cpu"), 0),
        ],
        "copy-into-host": [
            (into(HOST, X, X), 1),
            (into(HOST, X, X, **late), 1),
            (into(HOST, X, X, **late, **pinned), 0),
            (into(STRIDED, X, X, **late, **pinned), 1),
            (into([HOST, SCALAR], [X, SCALAR], X), 1),
            (into(HOST, SQUARE), 0),
        ],
        "upload": [
            (copied(X, to="cuda:0"), 1),
            (copied(LOOSE, to="cuda:0"), 2),
            (copied(HOST, to="cuda", **pinned), 1),
            (copied(HOST, to="cuda", **late), 0),
            (copied(EMPTY, to="cuda"), 0),
        ],
        "upload-pageable": [
            (copied(X, to="cuda:0", **late), 1),
            (copied(HOST, to="cuda:0", **late, **pinned), 0),
            (copied(STRIDED, to="cuda:0", **late, **pinned), 1),
            (copied(transposed, to="cuda:0", **late, pinned=(transposed,)), 0),
            (copied(transposed, to="cuda", **late, dtype=torch.half, pinned=(transposed,)), 1),
            (copied(X, to="cuda:0"), 0),
        ],
        "copy-into-device": [
            (into(X, HOST, X), 1),
            (into(X, HOST, X, **late, **pinned), 0),
            (into([X, X], [HOST, HOST], X), 2),
            (into(X, SQUARE, X, SQUARE), 0),
        ],
        "new-tensor": [
            (ask("aten::lift_fresh", X, self=X), 1),
            (ask("aten::lift_fresh", self=X), 0),
            (ask("aten::lift_fresh", EMPTY, self=EMPTY), 0),
        ],
    }


def _uploads() -> dict[str, list[Case]]:
    def where(*device: Tensor, other: Tensor) -> Asked:
        return ask("aten::where.self", *device, condition=MASK, self=X, other=other)

    return {
        "host-index": [
            (indexed([ROWS3], X), 1),
            (indexed([ROWS3, ROWS3], X), 2),
            (indexed([ROWS3], X, ROWS3), 0),
            (indexed([ROWS3]), 0),
            (indexed([MASK], X), 0),
        ],
        "host-index-assign": [
            (put([ROWS3], HOST, X, HOST), 1),
            (put([MASK], HOST, X, HOST, accumulate=True), 2),
            (put([MASK], HOST, X, HOST), 0),
            (put([ROWS3], HOST, X, HOST, ROWS3), 0),
        ],
        "host-index-fill": [
            (ask("aten::index_fill_.int_Scalar", X, self=X, index=ROWS3), 1),
            (ask("aten::index_fill_.int_Scalar", X, ROWS3, self=X, index=ROWS3), 0),
            (ask("aten::index_fill_.int_Scalar", self=X, index=ROWS3), 0),
        ],
        "assigned-number": [
            (put([ROWS3], SCALAR, X, ROWS3), 1),
            (put([MASK], SCALAR, X), 1),
            (put([MASK], SCALAR, X, MASK), 0),
            (put([ROWS3], SCALAR, X, ROWS3, SCALAR), 0),
        ],
        "where-number": [
            (where(MASK, X, other=SCALAR), 1),
            (where(MASK, X, SCALAR, other=SCALAR), 0),
            (where(other=SCALAR), 0),
        ],
        "bernoulli-probability": [
            (ask("aten::bernoulli_.Tensor", X, self=X, p=HOST), 1),
            (ask("aten::bernoulli_.Tensor", X, HOST, self=X, p=HOST), 0),
        ],
        "ctc-loss-lengths": [
            (ask("aten::_ctc_loss", X, log_probs=X, targets=ROWS3), 3),
            (ask("aten::_ctc_loss_backward", X, log_probs=X, targets=ROWS3), 3),
            (ask("aten::_ctc_loss", log_probs=X, targets=ROWS3), 0),
        ],
        "ctc-loss-targets": [
            (ask("aten::_ctc_loss", X, ROWS3, log_probs=X, targets=ROWS3), 1),
            (ask("aten::_ctc_loss", X, log_probs=X, targets=ROWS3), 0),
            (_lengths(ROWS3, MANY, device=(X, ROWS3)), 2),
        ],
        "ctc-loss-host-targets": [
            (ask("aten::_ctc_loss", X, log_probs=X, targets=ROWS3), 1),
            (ask("aten::_ctc_loss", X, ROWS3, log_probs=X, targets=ROWS3), 0),
            (ask("aten::_ctc_loss", log_probs=X, targets=ROWS3), 0),
        ],
        "ctc-loss-read-lengths": [
            (_lengths(ROWS3, MANY, device=(X, ROWS3, MANY)), 2),
            (_lengths(ROWS3, MANY, device=(X, MANY)), 1),
            (_lengths(ROWS3, MANY, device=(X,)), 0),
        ],
        "gathered-count": [
            (ask("aten::batch_norm_gather_stats", X, input=X), 1),
            (ask("aten::batch_norm_gather_stats", input=X), 0),
        ],
    }


def _lengths(inputs: Tensor, targets: Tensor, *, device: tuple[Tensor, ...]) -> Asked:
    named = {"input_lengths": inputs, "target_lengths": targets}
    return ask("aten::_ctc_loss.Tensor", *device, log_probs=X, targets=ROWS3, **named)


def _libraries() -> dict[str, list[Case]]:
    def suppress(boxes: Tensor, *device: Tensor) -> Asked:
        args = {"dets": boxes, "scores": SCALAR, "iou_threshold": 0.5}
        return Asked("torchvision::nms.default", args, device)

    return {"torchvision-nms": [(suppress(X, X), 1), (suppress(X), 0), (suppress(EMPTY, EMPTY), 0)]}


_FAMILIES: tuple[Callable[[], dict[str, list[Case]]], ...] = (
    _reads,
    _algebra,
    _shapes,
    _copies,
    _uploads,
    _libraries,
)

CASES = {
    name: cases
    for family in _FAMILIES
    for name, cases in family().items()
    if holds(row(name), str(torch.__version__))
}
