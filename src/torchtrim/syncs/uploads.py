"""Rows about small host tensors that an operator copies to the device itself."""

from __future__ import annotations

from typing import Any

from torchtrim.syncs.base import (
    TT101,
    TT103,
    Ask,
    apart,
    device,
    each_device,
    is_mask,
    is_tensor,
    native,
    on_device,
    on_host,
    pytorch,
)
from torchtrim.syncs.shapes import INDEX, INDEX_PUT, is_masked_fill

_INDEXING = "aten/src/ATen/TensorIndexing.h"


def _host_indices(ask: Ask) -> int:
    """Count the copies of index tensors on the host; a mask has one for each dimension, if it accumulates."""
    if not on_device(ask, ask.args["self"]):
        return 0
    found = [index for index in ask.args["indices"] if on_host(ask, index)]
    positions: int = sum(not is_mask(index) and index.numel() > 0 for index in found)
    dimensions: int = sum(index.dim() for index in found if is_mask(index))
    return positions + dimensions * bool(ask.args.get("accumulate"))


def _assigned_value(ask: Ask) -> int:
    value: Any = ask.args["values"]
    moved = on_device(ask, ask.args["self"]) and on_host(ask, value) and value.dim() == 0
    return int(moved and not is_masked_fill(ask))


def _chosen_scalars(ask: Ask) -> int:
    found = [ask.args[name] for name in ("condition", "self", "other")]
    if not any(on_device(ask, one) for one in found):
        return 0
    return sum(on_host(ask, one) and one.dim() == 0 for one in found)


def _targets(ask: Ask) -> int:
    both = on_device(ask, ask.args["log_probs"]) and on_device(ask, ask.args["targets"])
    if not both or not ask.args["targets"].numel():
        return 0
    return 2 if is_tensor(ask.args["target_lengths"]) else 1


ROWS = (
    TT103(
        name="host-index",
        what="A tensor on the device is indexed by positions on the host, also in `x[[0, 2]]`",
        when="once for each index tensor on the host",
        operators=INDEX,
        waits=_host_indices,
        evidence=(native("IndexingUtils.h", 61, "a blocking copy of the index"),),
        advice="Keep the index on the device; for a few positions slices and `narrow`.",
    ),
    TT103(
        name="host-index-assign",
        what="A tensor on the device is assigned to by positions on the host",
        when="once for each index tensor on the host; if it accumulates, a mask on the host counts too",
        operators=INDEX_PUT,
        waits=_host_indices,
        evidence=(
            native("IndexingUtils.h", 61, "a blocking copy of the index"),
            native("cuda/Indexing.cu", 590, "the same if it accumulates"),
        ),
        advice="Keep the index on the device.",
    ),
    TT103(
        name="host-index-fill",
        what="A Python number is assigned to positions on the host, `x[[0, 2]] = 3.0`, since 2.15",
        when="the tensor is on the device and the positions are not",
        operators=("aten::index_fill_.int_Scalar",),
        waits=apart("self", "index", skips=True),
        evidence=(
            native("IndexingUtils.h", 61, "a blocking copy of the index"),
            pytorch(
                _INDEXING,
                751,
                "the number is no longer moved: the indexed elements are filled",
                "v2.15.0",
            ),
        ),
        advice="Keep the index on the device.",
        since="2.15",
    ),
    TT103(
        name="assigned-number",
        what="`x[positions] = 3.0`",
        when="the value is a 0-dim tensor on the host, or before 2.15 a number, and the index is not a "
        "single mask",
        operators=INDEX_PUT,
        waits=_assigned_value,
        evidence=(
            native("TensorAdvancedIndexing.cpp", 981, "a blocking copy of the number"),
            pytorch(
                _INDEXING, 478, "a Python number is made on the device, which is free", "v2.15.0"
            ),
        ),
        advice="`x.index_fill_(dim, positions, 3.0)`, or a value that is on the device.",
    ),
    TT103(
        name="where-number",
        what="`torch.where` with a 0-dim tensor on the host",
        when="once for each such tensor, if another tensor is on the device; a Python number is free",
        operators=("aten::where.self", "aten::where.self_out"),
        waits=_chosen_scalars,
        evidence=(
            native("TensorCompare.cpp", 612, "a blocking copy of a condition on the host"),
            native("TensorCompare.cpp", 615, "the value if it is true"),
            native("TensorCompare.cpp", 618, "the value if it is false"),
        ),
        advice="A Python number, or a tensor that is on the device.",
    ),
    TT103(
        name="bernoulli-probability",
        what="`bernoulli_` with probabilities on the host",
        when="`p` is a tensor on the host and `self` is on the device",
        operators=("aten::bernoulli_.Tensor", "aten::bernoulli.Tensor"),
        waits=apart("self", "p"),
        evidence=(
            native("cuda/DistributionTemplates.h", 662, "a blocking copy of the probabilities"),
        ),
        advice="A Python number, or a tensor that is on the device.",
    ),
    TT103(
        name="ctc-loss-lengths",
        what="`ctc_loss`, forward and backward, if cuDNN does not compute it",
        when="`log_probs` is on the device: three times",
        operators=("aten::_ctc_loss", "aten::_ctc_loss_backward"),
        waits=device("log_probs", times=3),
        evidence=(
            native("cuda/LossCTC.cu", 287, "the lengths of the targets are moved"),
            native("cuda/LossCTC.cu", 288, "the lengths of the input"),
            native("cuda/LossCTC.cu", 289, "the offsets of the targets"),
            native("cuda/LossCTC.cu", 642, "the same three in backward"),
        ),
        advice="Inputs that cuDNN supports: int32 targets and lengths on the host, blank 0.",
    ),
    TT101(
        name="ctc-loss-targets",
        what="`ctc_loss` looks at the targets on the host",
        when="the targets are on the device: once, and twice if the lengths are tensors",
        operators=("aten::_ctc_loss",),
        waits=_targets,
        evidence=(
            native("LossCTC.cpp", 516, "copies the targets, with cuDNN too"),
            native("LossCTC.cpp", 569, "copies them once more if the lengths are tensors"),
        ),
        advice="Leave the targets on the host, or give the lengths as tuples.",
        since="2.11",
    ),
    TT103(
        name="ctc-loss-host-targets",
        what="`ctc_loss` with targets on the host, if cuDNN does not compute it",
        when="`log_probs` is on the device and the targets are not",
        operators=("aten::_ctc_loss",),
        waits=apart("log_probs", "targets", skips=True),
        evidence=(native("LossCTC.cpp", 532, "a blocking copy of the targets"),),
        advice="Inputs that cuDNN supports: int32 targets in a row, tuples of lengths, blank 0, full input.",
    ),
    TT101(
        name="ctc-loss-read-lengths",
        what="`ctc_loss` with tensors of lengths",
        when="once for each that is on the device",
        operators=("aten::_ctc_loss.Tensor", "aten::_ctc_loss_backward.Tensor"),
        waits=each_device("input_lengths", "target_lengths"),
        evidence=(
            native("LossCTC.cpp", 439, "copies the lengths of the input"),
            native("LossCTC.cpp", 440, "copies the lengths of the targets"),
            native("LossCTC.cpp", 473, "the same in backward"),
        ),
        advice="Lengths on the host, or as tuples.",
    ),
    TT103(
        name="gathered-count",
        what="`batch_norm_gather_stats` with one count for all",
        when="always",
        operators=("aten::batch_norm_gather_stats",),
        waits=device("input"),
        evidence=(native("cuda/Normalization.cu", 702, "a blocking copy of the counts"),),
        advice="`batch_norm_gather_stats_with_counts`, as `SyncBatchNorm` does.",
    ),
)
