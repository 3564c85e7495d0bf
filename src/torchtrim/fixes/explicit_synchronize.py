"""`torch.cuda.synchronize()` is taken out where nothing needs it.

PyTorch orders all work on a stream itself, and waits where a value is read. Waiting for the whole device by
hand is needed for clocks, for memory statistics, for streams and events of one's own, for copies to the
host that do not wait, for several processes and for other libraries that use the device. A file that has a
word of those keeps it.

Refused there. To measure time, record two events and read `elapsed_time` later; the host need not wait.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from torchtrim.rewriter.fix import Edit, Fix, Match, Writing
from torchtrim.rewriter.replace import check_comments
from torchtrim.source.facts import Facts, Refused
from torchtrim.source.source import Source

_CLOCKS_NAMES = """
    time perf_counter perf_counter_ns monotonic process_time time_ns timeit elapsed_time Timer timer
    profile profiler datetime nvtx
"""
_CLOCKS = frozenset(_CLOCKS_NAMES.split())
_OTHERS_NAMES = """
    Stream stream streams Event events non_blocking record_stream CUDAGraph graph distributed dist
    DistributedDataParallel cupy numba ctypes data_ptr cudart memory_allocated max_memory_allocated
    memory_reserved max_memory_reserved memory_stats mem_get_info empty_cache reset_peak_memory_stats
    share_memory_ multiprocessing Thread threading pin_memory load_inline cpp_extension jax cudf cv2
    tensorrt onnxruntime triton pycuda
"""
_OTHERS = frozenset(_OTHERS_NAMES.split())
_NAMES = ("torch.cuda.synchronize", "torch.accelerator.synchronize")


def find(source: Source) -> Iterator[Match]:
    """Each device-wide sync that is a statement."""
    for node in source.at({(ast.Call, "synchronize")}):
        assert isinstance(node, ast.Call)
        statement = source.parents[node]
        if source.dotted(node.func) in _NAMES and isinstance(statement, ast.Expr):
            yield Match(fix=FIX, source=source, node=statement, parts={})


def write(match: Match, facts: Facts) -> Writing:
    """The file without it."""
    source, statement = match.source, match.node
    assert isinstance(statement, ast.Expr)
    if clock := sorted(_CLOCKS & source.words):
        raise Refused(
            f"`{clock[0]}` in this file looks at a clock. Record two `torch.cuda.Event(enable_timing=True)` "
            "and read `start.elapsed_time(end)` later, or wait only where times are asked for"
        )
    if other := sorted(_OTHERS & source.words):
        raise Refused(f"`{other[0]}` in this file may rely on it")
    if any(isinstance(one, ast.Call) for one in ast.walk(statement) if one is not statement.value):
        raise Refused("its argument is computed, which may do more than give a device")
    edits = (_removed(source, statement),)
    check_comments(source, edits)
    return Writing(edits)


def _removed(source: Source, statement: ast.Expr) -> Edit:
    start, end = source.start(statement), source.end(statement)
    blanks = source.indentation(statement)
    rest = source.text[end:].partition("\n")[0]
    if blanks is None or rest.strip() or len(source.block(statement)) == 1:
        return Edit(start, end, "pass")
    return Edit(start - len(blanks), end + len(rest) + (end + len(rest) < len(source.text)), "")


FIX = Fix(codes=("TT104",), equivalence="BITWISE", find=find, write=write)
