"""Rows about calls that are no operators."""

from __future__ import annotations

from torchtrim.syncs.asks import no_operator
from torchtrim.syncs.base import Evidence, Row
from torchtrim.syncs.sources import installed, native, pytorch

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
