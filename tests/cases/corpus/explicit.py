"""Calls that ask for a wait, and those beside them that do not."""

from __future__ import annotations

import torch
from tests.cases.corpus.snippet import Body, snippet
from tests.cases.corpus.sources import ELEMENTWISE, RANDOM, SHAPE, line, thread


@snippet(
    1,
    line("c10/cuda/CUDAFunctions.cpp", 153, "cudaDeviceSynchronize"),
    thread("facebookresearch/ConvNeXt", 106, "in each step of training"),
)
def synchronize() -> Body:
    x = torch.rand(8, device="cuda")

    def body() -> object:
        y = x * 2
        torch.cuda.synchronize()
        return y

    return body


@snippet(0, ELEMENTWISE, repairs=synchronize)
def not_synchronized() -> Body:
    x = torch.rand(8, device="cuda")
    return lambda: x * 2


@snippet(
    3,
    line("c10/cuda/CUDAFunctions.cpp", 153, "cudaDeviceSynchronize"),
    thread("ultralytics/ultralytics", 21411, "three in each prediction"),
)
def synchronize_around_each_part() -> Body:
    x = torch.rand(8, device="cuda")

    def body() -> object:
        y = x
        for _ in range(3):
            y = y * 2
            torch.cuda.synchronize()
        return y

    return body


@snippet(1, line("c10/cuda/CUDAStream.cpp", 292, "stream_synchronize"))
def stream_synchronize() -> Body:
    return lambda: torch.cuda.current_stream().synchronize()


@snippet(1, line("c10/cuda/CUDAEvent.h", 224, "cudaEventSynchronize"))
def event_synchronize() -> Body:
    x = torch.rand(8, device="cuda")

    def body() -> object:
        done = torch.cuda.Event()
        y = x * 2
        done.record()
        done.synchronize()
        return y

    return body


@snippet(
    0, line("torch/cuda/streams.py", 65, "a stream waits, not the host"), repairs=event_synchronize
)
def streams_that_wait() -> Body:
    x, side = torch.rand(8, device="cuda"), torch.cuda.Stream()

    def body() -> object:
        begin = torch.cuda.Event(enable_timing=True)
        begin.record()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y = x * 2
            y.record_stream(side)
        side.wait_event(begin)
        torch.cuda.current_stream().wait_stream(side)
        return y

    return body


@snippet(1, line("c10/cuda/CUDACachingAllocator.cpp", 3803, "cudaFree of each block"), exact=False)
def empty_cache() -> Body:
    x = [torch.rand(1 << 20, device="cuda")]

    def body() -> object:
        x.clear()
        torch.cuda.empty_cache()
        return x

    return body


@snippet(0, SHAPE)
def memory_looked_at() -> Body:
    x = torch.rand(8, device="cuda")

    def body() -> object:
        torch.cuda.reset_peak_memory_stats()
        return x + 1, torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()

    return body


@snippet(0, RANDOM)
def seeds_and_devices() -> Body:
    def body() -> object:
        torch.manual_seed(1)
        torch.cuda.manual_seed_all(1)
        generator = torch.Generator(device="cuda").manual_seed(2)
        return torch.rand(4, device="cuda", generator=generator), torch.cuda.device_count()

    return body
