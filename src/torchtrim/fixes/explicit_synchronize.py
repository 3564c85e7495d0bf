"""`torch.cuda.synchronize()` is removed if nothing needs it.

PyTorch itself orders all work on a stream, and waits where a value is read. An explicit wait for the whole
device is needed for clocks, memory statistics, the program's own streams and events, non-blocking copies to
the host, several processes, and other libraries that use the device. In a file that mentions one of these,
and where a helper of the project is called, such as `get_accelerator().synchronize()`, the line is only shown
as a diff to copy.

Refused in a function that reads a clock. To measure time, record two events and read `elapsed_time` later;
the host need not wait.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from torchtrim.rewriter.fix import Fix, Match, Writing
from torchtrim.rewriter.replace import deleted
from torchtrim.source.facts import Facts, FixRefused
from torchtrim.source.nodes import called, find_all, name_set
from torchtrim.source.operations import SYNCHRONIZING
from torchtrim.source.source import SourceFile

_CLOCKS = name_set("""
    time perf_counter perf_counter_ns monotonic process_time time_ns timeit elapsed_time Timer timer
    profile profiler datetime nvtx
""")
_OTHERS = name_set("""
    Stream stream streams Event events non_blocking record_stream CUDAGraph graph distributed dist
    DistributedDataParallel cupy numba ctypes data_ptr cudart memory_allocated max_memory_allocated
    memory_reserved max_memory_reserved memory_stats mem_get_info empty_cache reset_peak_memory_stats
    share_memory_ multiprocessing Thread threading pin_memory load_inline cpp_extension jax cudf cv2
    tensorrt onnxruntime triton pycuda
""")
_NAMES = ("torch.cuda.synchronize", "torch.accelerator.synchronize")


def _find(source: SourceFile) -> Iterator[Match]:
    for node in source.each(ast.Call):
        statement = source.parents[node]
        name = source.dotted(node.func) or ""
        if name in _NAMES or (called(node.func) in SYNCHRONIZING and not node.args):
            form = name if name in _NAMES else ""
            if isinstance(statement, ast.Expr):
                yield Match(fix=FIX, source=source, node=statement, parts={}, form=form)


def _write(match: Match, facts: Facts) -> Writing:
    source, statement = match.source, match.node_as(ast.Expr)
    function = source.function(statement)
    if clock := sorted(_CLOCKS & {called(part) for part in ast.walk(function)}):
        raise FixRefused(
            f"`{clock[0]}` in this function reads a clock. Record two `torch.cuda.Event(enable_timing=True)` "
            "and read `start.elapsed_time(end)` later, or wait only where times are read"
        )
    advice = (
        "" if match.form else "unless the helper does more, or other streams need it, leave it out"
    )
    if other := sorted((_OTHERS | _CLOCKS) & source.words):
        advice = f"`{other[0]}` in this file may rely on it. If nothing does, leave it out"
    if match.form and len(list(find_all(statement, ast.Call))) > 1:
        raise FixRefused("its argument is computed, which may have a side effect")
    return Writing((deleted(source, statement),), advice=advice)


FIX = Fix(codes=("TT104",), equivalence="BITWISE", find=_find, write=_write)
