"""Rows about values that the host reads."""

from __future__ import annotations

from torchtrim.syncs.base import (
    TT101,
    Ask,
    apart,
    device,
    each_device,
    filled,
    native,
    on_device,
    pytorch,
)

_MOST_FUSED_MODE = 2048  # MAX_BLOCK_SIZE * 2 elements of a slice fit the fused kernel.


def _read_equal(ask: Ask) -> int:
    left, right = ask.args["self"], ask.args["other"]
    if not on_device(ask, left) or left.shape != right.shape or not left.numel():
        return 0
    return int(left.data_ptr() != right.data_ptr() or left.stride() != right.stride())


def _histogram_range(ask: Ask) -> int:
    values = ask.args["self"]
    unknown = ask.args["min"] == ask.args["max"]
    return 2 if on_device(ask, values) and unknown and values.numel() else 0


def _long_mode(ask: Ask) -> int:
    values = ask.args["self"]
    if not on_device(ask, values) or not values.dim():
        return 0
    return int(values.shape[ask.args["dim"]] > _MOST_FUSED_MODE)


def _segment_lengths(ask: Ask) -> int:
    lengths = ask.args.get("lengths")
    return 2 if not ask.args.get("unsafe") and on_device(ask, lengths) else 0


def _observed_rows(ask: Ask) -> int:
    return int(bool(ask.args.get("per_row_fake_quant")) and on_device(ask, ask.args["self"]))


def _padding(ask: Ask) -> int:
    if not on_device(ask, ask.args["mask"]):
        return 0
    return 1 + bool(ask.args.get("mask_check"))


ROWS = (
    TT101(
        name="item",
        what="A value of one element is read: `.item()`, `float(t)`, `int(t)`, `bool(t)`, `if t:`, "
        "`range(t)`, `x[:t]`, an f-string, a number argument such as `alpha=t`",
        when="the tensor is on the device",
        operators=("aten::_local_scalar_dense",),
        waits=device("self"),
        evidence=(
            native(
                "cuda/CUDAScalar.cu", 61, "copies the element to pinned memory and synchronizes"
            ),
            pytorch("c10/cuda/CUDAFunctions.h", 106, "a copy, then a sync of its stream"),
        ),
        advice="Keep the value as a tensor (`torch.where`, `clamp`), or read several at once and later.",
    ),
    TT101(
        name="equal",
        what="`torch.equal`, which returns a Python bool",
        when="both are on the device, of one shape, not empty, and not the same memory",
        operators=("aten::equal",),
        waits=_read_equal,
        evidence=(native("cuda/Equal.cpp", 45, "reads whether all elements are equal"),),
        advice="`(a == b).all()` stays on the device; read it when you need it.",
    ),
    TT101(
        name="allclose",
        what="`torch.allclose`, which returns a Python bool",
        when="the tensors are on the device",
        operators=("aten::allclose",),
        waits=device("self", "other"),
        evidence=(native("TensorCompare.cpp", 334, "reads whether all elements are close"),),
        advice="`torch.isclose(a, b).all()` stays on the device.",
    ),
    TT101(
        name="fill-host",
        what="A tensor on the host is filled with a value on the device",
        when="`value` is on the device and `self` is not",
        operators=("aten::fill_.Tensor", "aten::fill.Tensor"),
        waits=apart("value", "self"),
        evidence=(native("Fill.cpp", 58, "reads the value if the devices differ"),),
        advice="Keep the filled tensor on the device.",
    ),
    TT101(
        name="masked-fill-value",
        what="`masked_fill` with a tensor as the value",
        when="the value is on the device; a number or a 0-dim tensor on the host is free",
        operators=("aten::masked_fill.Tensor", "aten::masked_fill_.Tensor"),
        waits=device("value"),
        evidence=(native("cuda/Indexing.cu", 1867, "reads the value to fill with a number"),),
        advice="`torch.where(mask, value, x)`.",
    ),
    TT101(
        name="index-fill-value",
        what="`index_fill` with a tensor as the value",
        when="the value is on the device",
        operators=("aten::index_fill.int_Tensor", "aten::index_fill_.int_Tensor"),
        waits=device("value"),
        evidence=(
            native("TensorAdvancedIndexing.cpp", 1976, "reads the value to fill with a number"),
        ),
        advice="`index_copy` with the value expanded, or a number.",
    ),
    TT101(
        name="range-bounds",
        what="`linspace` and `logspace` between tensors",
        when="once for each bound that is on the device",
        operators=tuple(
            f"aten::{name}.{bounds}{out}"
            for name in ("linspace", "logspace")
            for bounds in ("Tensor_Tensor", "Tensor_Scalar", "Scalar_Tensor")
            for out in ("", "_out")
        ),
        waits=each_device("start", "end"),
        evidence=(
            native("TensorFactories.cpp", 842, "reads both bounds of linspace"),
            native("TensorFactories.cpp", 922, "reads both bounds of logspace"),
        ),
        advice="Numbers as bounds, or `start + (end - start) * torch.linspace(0, 1, n)`.",
    ),
    TT101(
        name="histogram-range",
        what="`histc` that finds the range itself",
        when="`min` equals `max` and the input is on the device and not empty: twice",
        operators=("aten::histc",),
        waits=_histogram_range,
        evidence=(
            native("cuda/SummaryOps.cu", 330, "reads the smallest value"),
            native("cuda/SummaryOps.cu", 331, "reads the largest value"),
        ),
        advice="Give `min` and `max`.",
    ),
    TT101(
        name="normal-std",
        what="`torch.normal` with a tensor of standard deviations, so also `Normal(...).sample()`",
        when="`std` is a tensor on the device and not empty",
        operators=(
            "aten::normal.Tensor_Tensor",
            "aten::normal.float_Tensor",
            "aten::normal.Tensor_Tensor_out",
            "aten::normal.float_Tensor_out",
        ),
        waits=filled("std"),
        evidence=(native("DistributionTemplates.h", 195, "reads whether all deviations are >= 0"),),
        advice="`mean + std * torch.randn_like(std)`; for a distribution, `rsample()`.",
    ),
    TT101(
        name="long-mode",
        what="`torch.mode` over a long dimension",
        when="the dimension is longer than 2,048, at least once for each slice",
        operators=("aten::mode",),
        waits=_long_mode,
        evidence=(
            native("cuda/TensorModeKernel.cu", 175, "each slice's result is copied with a sync"),
        ),
        advice="`unique` with counts, or a histogram if there are few values.",
    ),
    TT101(
        name="segment-lengths",
        what="`segment_reduce` by lengths",
        when="the lengths are on the device and `unsafe` is False: twice",
        operators=("aten::segment_reduce",),
        waits=_segment_lengths,
        evidence=(
            native("SegmentReduce.cpp", 442, "reads the shortest length"),
            native("SegmentReduce.cpp", 444, "reads whether the lengths add up"),
        ),
        advice="`unsafe=True`, or offsets.",
    ),
    TT101(
        name="fake-quant-switch",
        what="Fake quantization of each row with a moving average",
        when="`per_row_fake_quant` is True",
        operators=("aten::_fused_moving_avg_obs_fq_helper",),
        waits=_observed_rows,
        evidence=(native("quantized/cuda/FusedObsFakeQuant.cu", 346, "reads the switch"),),
        advice="Fake quantization of whole tensors, or separate observers.",
    ),
    TT101(
        name="sorter-range",
        what="`searchsorted` in a table with a `sorter`",
        when="`sorter` is on the device and not empty: twice",
        operators=tuple(
            f"aten::searchsorted.{values}{out}"
            for values in ("Tensor", "Scalar")
            for out in ("", "_out")
        ),
        waits=filled("sorter", times=2),
        evidence=(
            native("BucketizationUtils.h", 139, "reads the smallest index"),
            native("BucketizationUtils.h", 140, "reads the largest index"),
        ),
        advice="`table[sorter]` first, then `searchsorted` without a sorter.",
    ),
    TT101(
        name="padding-mask",
        what="A padded batch becomes a ragged one, as in `TransformerEncoder(..., src_key_padding_mask=...)` "
        "in evaluation without gradients",
        when="the mask is on the device: once to check the alignment, once to read the sizes",
        operators=(
            "aten::_nested_tensor_from_mask",
            "aten::_nested_tensor_from_mask_left_aligned",
        ),
        waits=_padding,
        evidence=(
            native("nested/NestedTensorMath.cpp", 114, "compares the lengths with the first gaps"),
            native("nested/NestedTensorMath.cpp", 91, "copies the sizes to the host"),
            native(
                "nested/NestedTensorMath.cpp",
                84,
                "compares the lengths here too, with `mask_check`",
            ),
        ),
        advice="`enable_nested_tensor=False` in the encoder.",
    ),
    TT101(
        name="zero-points",
        what="Quantization with zero points of each channel",
        when="the zero points are on the device: twice",
        operators=("aten::quantize_per_channel",),
        waits=device("zero_points", times=2),
        evidence=(
            native("quantized/cuda/AffineQuantizer.cu", 27, "reads whether any is too large"),
            native("quantized/cuda/AffineQuantizer.cu", 28, "reads whether any is too small"),
        ),
        advice="Quantize once, ahead of the loop.",
    ),
)
