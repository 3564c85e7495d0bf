"""Rows about calls that are not operators, syncs hidden from a dispatch mode, and other libraries.

While a dispatch mode runs, torch skips the hidden syncs, so the mode reports them itself. `BACKWARD` maps
the names of autograd nodes to the rows of their gradients' syncs.
"""

from __future__ import annotations

from torchtrim.syncs.base import TT102, Citation, Row, filled, native, pytorch

_ALLOCATOR = "c10/cuda/CUDACachingAllocator.cpp"


_MANUAL = "torch/csrc/autograd/FunctionsManual.cpp"
_READ_REF = "v2.13.0"
_SANITIZER = pytorch(
    "torch/cuda/_sanitizer.py", 226, "the others' work that a stream has seen", _READ_REF
)
_RACE = ": a race, not a wait; reported with `--streams`"


def _row(code: str, name: str, what: str, when: str, advice: str, *evidence: Citation) -> Row:
    return Row(name=name, code=code, what=what, when=when, evidence=evidence, advice=advice)


ROWS = (
    _row(
        "TT104",
        "synchronize",
        "`torch.cuda.synchronize()`, `torch.accelerator.synchronize()`",
        "always, for all streams of the device",
        "Measure with CUDA events that are read later.",
        pytorch("c10/cuda/CUDAFunctions.cpp", 153, "synchronizes the device"),
    ),
    _row(
        "TT104",
        "stream-synchronize",
        "`Stream.synchronize()`",
        "always, for the work queued on the stream",
        "`wait_stream` makes a stream wait, not the host.",
        pytorch("c10/cuda/CUDAStream.cpp", 292, "synchronizes the stream"),
    ),
    _row(
        "TT104",
        "event-synchronize",
        "`Event.synchronize()`",
        "always, for the work queued before the event was recorded",
        "`Stream.wait_event`, or `Event.query()` later.",
        pytorch("c10/cuda/CUDAEvent.h", 224, "synchronizes the event"),
    ),
    _row(
        "TT104",
        "empty-cache",
        "`torch.cuda.empty_cache()`",
        "blocks are cached; an allocation that finds no memory does the same before it fails",
        "Not in a loop: the next step allocates the same again.",
        pytorch(_ALLOCATOR, 3803, "returns memory to the driver, which synchronizes the device"),
        pytorch(_ALLOCATOR, 3957, "synchronizes if other streams use the memory"),
    ),
    _row(
        "TT104",
        "graph-capture",
        "`torch.cuda.graph(...)` as it begins",
        "always",
        "Capture once, replay often.",
        pytorch("torch/cuda/graphs.py", 247, "synchronizes the device before it captures"),
    ),
    _row(
        "TT104",
        "barrier",
        "`torch.distributed.barrier()` with NCCL",
        "always",
        "Collectives order work on the device; a barrier is rarely needed.",
        pytorch(
            "torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp",
            5394,
            "synchronizes the current stream",
        ),
    ),
    _row(
        "TT104",
        "unlisted",
        "An operator that CUDA reported as synchronizing, and that this table does not list",
        "on a GPU only, if `torch.cuda.set_sync_debug_mode` warned of it",
        "Look at the operator's arguments; a row for it would be welcome.",
        pytorch("c10/cuda/CUDAFunctions.h", 106, "the copy that synchronizes, and warns"),
    ),
    _row(
        "TT105",
        "async-read",
        "The result of a copy to the host with `non_blocking=True` is read too early",
        "the host has not waited for an event, stream or device in between: a race, not a wait",
        "Record an event after the copy and `synchronize()` it before reading.",
        native(
            "TensorConversions.cpp", 346, "the result is pinned, so that the copy need not block"
        ),
        native("cuda/Copy.cu", 468, "the copy is only queued"),
    ),
    _row(
        "TT105",
        "async-source",
        "Host memory is written while a copy from it with `non_blocking=True` may still be running",
        "the host has not waited for an event, stream or device in between: a race, not a wait",
        "Use two buffers in turn, each with an event.",
        native("cuda/Copy.cu", 468, "the copy is only queued"),
        native("cuda/Copy.cu", 486, "the memory is kept, not its contents"),
    ),
    _row(
        "TT105",
        "stream-read",
        "Data that another stream computes or copies is read too early",
        f"the stream has not waited for the stream that wrote it last{_RACE}",
        "Have the stream that reads wait first: `reading.wait_stream(writing)`, or an event after the write.",
        _SANITIZER,
    ),
    _row(
        "TT105",
        "stream-write",
        "Data that another stream may still be reading or writing is overwritten",
        f"the stream has not waited for all that use the memory{_RACE}",
        "Record an event after the other stream's last use, and await it before the write.",
        _SANITIZER,
    ),
    _row(
        "TT105",
        "stream-free",
        "A tensor's memory is reused while a stream that uses the tensor may still be running",
        f"it was freed; its own stream has not waited, and `record_stream` was not called{_RACE}",
        "Keep the tensor until its own stream has waited for an event after that use, or call "
        "`tensor.record_stream(stream)`.",
        pytorch(
            "torch/_tensor_docs.py",
            3988,
            "the allocator knows only the stream of origin",
            _READ_REF,
        ),
    ),
)

_PRODUCT = _row(
    "TT102",
    "product-backward",
    "the gradient of `prod()`",
    "in backward, to find which elements are 0",
    "If no element is 0, `x.log().sum().exp()`.",
    pytorch(_MANUAL, 875, "finds the elements that are 0"),
    pytorch(_MANUAL, 909, "reads the number of zeros along a dimension"),
)

_CUMULATIVE = _row(
    "TT101",
    "cumulative-product-backward",
    "the gradient of `cumprod()`",
    "in backward, to know whether any element is 0",
    "If no element is 0, `x.log().cumsum(dim).exp()`.",
    native("ReduceOps.cpp", 640, "reads whether any element is 0"),
)

HIDDEN = (
    _PRODUCT,
    _CUMULATIVE,
    _row(
        "TT102",
        "smoothed-weights",
        "`cross_entropy` with class weights and label smoothing, with `reduction='mean'`",
        "to sum the weights of the targets that are not ignored",
        "`reduction='sum'`, and a division by the sum of `weight[target]` if the target counts.",
        native("LossNLL.cpp", 612, "selects the targets that are not ignored"),
    ),
    _row(
        "TT102",
        "sparse-size",
        "`torch.sparse_coo_tensor(indices, values)` without a size",
        "the indices are on the device: the largest of each dimension is copied to the host",
        "Give the size.",
        native(
            "sparse/SparseTensor.cpp", 332, "copies the sizes that the indices need to the host"
        ),
    ),
)
BACKWARD = {
    "ProdBackward0": _PRODUCT,
    "ProdBackward1": _PRODUCT,
    "CumprodBackward0": _CUMULATIVE,
}


_VISION, _VISION_REF = "pytorch/vision", "a88eed4f034bcd65d8189f716d5c7cfc40ad75e9"
_NMS = "torchvision/csrc/ops/cuda/nms_kernel.cu"


def _vision(path: str, line: int, note: str) -> Citation:
    return Citation(repository=_VISION, ref=_VISION_REF, path=path, line=line, note=note)


LIBRARIES = (
    TT102(
        name="torchvision-nms",
        what="`torchvision.ops.nms`, and `batched_nms`, which calls it",
        when="there are boxes, and they are on the device",
        operators=("torchvision::nms",),
        waits=filled("dets"),
        evidence=(
            _vision(_NMS, 135, "copies the mask of overlapping boxes to the host"),
            _vision(_NMS, 164, "copies the remaining boxes back to the device"),
        ),
        advice="Suppress once for a batch, after the step's last launch; for a fixed number of boxes keep "
        "scores and a mask.",
    ),
)
FREE = frozenset(("torchvision::roi_align", "torchvision::_roi_align_backward"))
"""Read at pytorch/vision 072a51fe, `torchvision/csrc/ops/cuda/roi_align_kernel.cu`: launches without a
sync."""

_KNOWN_NAMESPACES = (
    *("aten", "prim", "prims", "profiler", "c10d", "_c10d_functional", "fsdp", "inductor"),
    "torchtrim",
)
_KNOWN = FREE.union(*(row.operators for row in LIBRARIES))


def is_unknown(operator: str) -> bool:
    """Return True if an operator's source was not read, such as `xformers::efficient_attention.default`."""
    base = operator.partition(".")[0]
    namespace, colons, _ = base.partition("::")
    return bool(colons) and namespace not in _KNOWN_NAMESPACES and base not in _KNOWN
