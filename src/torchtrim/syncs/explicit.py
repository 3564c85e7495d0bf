"""Rows about calls that are not operators, syncs hidden from a dispatch mode, and other libraries.

While a dispatch mode runs, torch skips the hidden syncs, so the mode reports them itself. `BACKWARD` maps
the names of autograd nodes to the rows of their gradients' syncs.
"""

from __future__ import annotations

from torchtrim.syncs.base import Evidence, Row, filled, installed, native, no_operator, pytorch

_ALLOCATOR = "c10/cuda/CUDACachingAllocator.cpp"


def _call(name: str, what: str, when: str, advice: str, *evidence: Evidence) -> Row:
    return Row(
        name=name,
        code="TT104",
        what=what,
        when=when,
        operators=(),
        waits=no_operator,
        evidence=evidence,
        advice=advice,
    )


SYNCHRONIZE = _call(
    "synchronize",
    "`torch.cuda.synchronize()`, `torch.accelerator.synchronize()`",
    "always, for all streams of the device",
    "Measure with CUDA events that are read later.",
    pytorch("c10/cuda/CUDAFunctions.cpp", 153, "synchronizes the device"),
)

STREAM = _call(
    "stream-synchronize",
    "`Stream.synchronize()`",
    "always, for the work queued on the stream",
    "`wait_stream` makes a stream wait, not the host.",
    pytorch("c10/cuda/CUDAStream.cpp", 292, "synchronizes the stream"),
)

EVENT = _call(
    "event-synchronize",
    "`Event.synchronize()`",
    "always, for the work queued before the event was recorded",
    "`Stream.wait_event`, or `Event.query()` later.",
    pytorch("c10/cuda/CUDAEvent.h", 224, "synchronizes the event"),
)

EMPTY_CACHE = _call(
    "empty-cache",
    "`torch.cuda.empty_cache()`",
    "blocks are cached; an allocation that finds no memory does the same before it fails",
    "Not in a loop: the next step allocates the same again.",
    pytorch(_ALLOCATOR, 3803, "returns memory to the driver, which synchronizes the device"),
    pytorch(_ALLOCATOR, 3957, "synchronizes where other streams use the memory"),
)

GRAPH = _call(
    "graph-capture",
    "`torch.cuda.graph(...)` as it begins",
    "always",
    "Capture once, replay often.",
    pytorch("torch/cuda/graphs.py", 247, "synchronizes the device before it captures"),
)

BARRIER = _call(
    "barrier",
    "`torch.distributed.barrier()` with NCCL",
    "always",
    "Collectives order work on the device; a barrier is seldom needed.",
    pytorch(
        "torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp", 5394, "synchronizes the current stream"
    ),
)

UNLISTED = _call(
    "unlisted",
    "An operator that CUDA saw waiting, and this table does not know",
    "on a GPU only, where `torch.cuda.set_sync_debug_mode` warned of it",
    "Look at the operator's arguments; a row for it would be welcome.",
    pytorch("c10/cuda/CUDAFunctions.h", 106, "the copy that waits, and warns"),
)

ASYNC_READ = Row(
    name="async-read",
    code="TT105",
    what="The result of a copy to the host with `non_blocking=True` is read too early",
    when="no event, stream or device was waited for in between: a race, and no wait",
    operators=(),
    waits=no_operator,
    evidence=(
        native("TensorConversions.cpp", 346, "the result is pinned, so that the copy may be late"),
        native("cuda/Copy.cu", 468, "the copy is only queued"),
    ),
    advice="Record an event after the copy and `synchronize()` it before reading.",
)

ASYNC_SOURCE = Row(
    name="async-source",
    code="TT105",
    what="Memory of the host is written to while a copy from it with `non_blocking=True` may be late",
    when="no event, stream or device was waited for in between: a race, and no wait",
    operators=(),
    waits=no_operator,
    evidence=(
        native("cuda/Copy.cu", 468, "the copy is only queued"),
        native("cuda/Copy.cu", 486, "the memory is kept, not its contents"),
    ),
    advice="Use two buffers in turn, each with an event.",
)


def _race(name: str, what: str, when: str, advice: str, *evidence: Evidence) -> Row:
    return Row(
        name=name,
        code="TT105",
        what=what,
        when=f"{when}: a race, and no wait; told with `--streams`",
        operators=(),
        waits=no_operator,
        evidence=evidence,
        advice=advice,
    )


STREAM_READ = _race(
    "stream-read",
    "What another stream computes or copies is read too early",
    "the stream has not waited for the stream that wrote it last",
    "Have the stream that reads wait first: `reading.wait_stream(writing)`, or an event after the write.",
    installed("torch/cuda/_sanitizer.py", 226, "what a stream has seen of the others' work"),
)

STREAM_WRITE = _race(
    "stream-write",
    "What another stream may still be reading or writing is written over",
    "the stream has not waited for all that use the memory",
    "Record an event after the other stream's last use, and await it before the write.",
    installed("torch/cuda/_sanitizer.py", 226, "what a stream has seen of the others' work"),
)

STREAM_FREE = _race(
    "stream-free",
    "A tensor is used on a stream that may still be at work when its memory goes to another tensor",
    "it was freed, and its own stream has neither waited nor been told by `record_stream`",
    "Keep the tensor until its own stream has waited for an event after that use, or call "
    "`tensor.record_stream(stream)`.",
    installed("torch/_tensor_docs.py", 3988, "the allocator knows only the stream of origin"),
)

ROWS = (
    *(SYNCHRONIZE, STREAM, EVENT, EMPTY_CACHE, GRAPH, BARRIER, UNLISTED, ASYNC_READ, ASYNC_SOURCE),
    *(STREAM_READ, STREAM_WRITE, STREAM_FREE),
)


_MANUAL = "torch/csrc/autograd/FunctionsManual.cpp"


def _hidden(name: str, code: str, what: str, when: str, advice: str, *evidence: Evidence) -> Row:
    return Row(
        name=name,
        code=code,
        what=what,
        when=when,
        operators=(),
        waits=no_operator,
        evidence=evidence,
        advice=advice,
    )


PRODUCT = _hidden(
    "product-backward",
    "TT102",
    "the gradient of `prod()`",
    "in backward, to find which elements are 0",
    "Where none is 0, `x.log().sum().exp()`.",
    pytorch(_MANUAL, 875, "finds the elements that are 0"),
    pytorch(_MANUAL, 909, "reads how many are 0, along a dimension"),
)

CUMULATIVE = _hidden(
    "cumulative-product-backward",
    "TT101",
    "the gradient of `cumprod()`",
    "in backward, to know whether any element is 0",
    "Where none is 0, `x.log().cumsum(dim).exp()`.",
    native("ReduceOps.cpp", 640, "reads whether any element is 0"),
)

SMOOTHED = _hidden(
    "smoothed-weights",
    "TT102",
    "`cross_entropy` with class weights and label smoothing, with `reduction='mean'`",
    "to sum the weights of the targets that are not ignored",
    "`reduction='sum'`, and a division by the sum of `weight[target]` where the target counts.",
    native("LossNLL.cpp", 612, "selects the targets that are not ignored"),
)

SPARSE_SIZE = _hidden(
    "sparse-size",
    "TT102",
    "`torch.sparse_coo_tensor(indices, values)` without a size",
    "the indices are on the device: the largest of each dimension is copied to the host",
    "Give the size.",
    native("sparse/SparseTensor.cpp", 332, "copies the sizes that the indices need to the host"),
)

BACKWARD = {
    "ProdBackward0": PRODUCT,
    "ProdBackward1": PRODUCT,
    "CumprodBackward0": CUMULATIVE,
}
HIDDEN = (PRODUCT, CUMULATIVE, SMOOTHED, SPARSE_SIZE)


_VISION, _VISION_REF = "pytorch/vision", "a88eed4f034bcd65d8189f716d5c7cfc40ad75e9"
_NMS = "torchvision/csrc/ops/cuda/nms_kernel.cu"


def _vision(path: str, line: int, note: str) -> Evidence:
    return Evidence(repository=_VISION, ref=_VISION_REF, path=path, line=line, note=note)


NMS = Row(
    name="torchvision-nms",
    code="TT102",
    what="`torchvision.ops.nms`, and `batched_nms`, which calls it",
    when="the boxes are on the device, and there are any",
    operators=("torchvision::nms",),
    waits=filled("dets"),
    evidence=(
        _vision(_NMS, 135, "copies which boxes overlap to the host"),
        _vision(_NMS, 164, "copies the boxes that are kept back to the device"),
    ),
    advice="Suppress once for a batch, after the step's last launch; for a fixed number of boxes keep scores "
    "and a mask.",
)

LIBRARIES = (NMS,)
FREE = frozenset(("torchvision::roi_align", "torchvision::_roi_align_backward"))
"""Read at pytorch/vision 072a51fe, `torchvision/csrc/ops/cuda/roi_align_kernel.cu`: launches without a
sync."""

_KNOWN = frozenset(
    (
        *("aten", "prim", "prims", "profiler", "c10d", "_c10d_functional", "fsdp", "inductor"),
        "torchtrim",
    )
)
_ASKED = frozenset(operator for row in LIBRARIES for operator in row.operators)


def is_unknown(operator: str) -> bool:
    """Return True if an operator's source was not read, such as `xformers::efficient_attention.default`."""
    base = operator.partition(".")[0]
    namespace, found, _ = base.partition("::")
    return bool(found) and namespace not in _KNOWN and base not in FREE | _ASKED
