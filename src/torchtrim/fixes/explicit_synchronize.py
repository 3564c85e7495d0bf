"""`torch.cuda.synchronize()` is removed if nothing needs it.

PyTorch itself orders all work on a stream, and waits where a value is read. An explicit wait for the whole
device is needed for clocks, memory statistics, the program's own streams and events, non-blocking copies to
the host, several processes, and other libraries that use the device. A file that mentions one of these keeps
it.

Refused there. To measure time, record two events and read `elapsed_time` later; the host need not wait.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from torchtrim.rewriter.fix import Fix, Match, TextEdit, Writing
from torchtrim.rewriter.replace import check_comments
from torchtrim.source.facts import Facts, FixRefused
from torchtrim.source.source import SourceFile

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


def _find(source: SourceFile) -> Iterator[Match]:
    for node in source.at({(ast.Call, "synchronize")}):
        assert isinstance(node, ast.Call)
        statement = source.parents[node]
        if source.dotted(node.func) in _NAMES and isinstance(statement, ast.Expr):
            yield Match(fix=FIX, source=source, node=statement, parts={})


def _write(match: Match, facts: Facts) -> Writing:
    source, statement = match.source, match.node
    assert isinstance(statement, ast.Expr)
    if clock := sorted(_CLOCKS & source.words):
        raise FixRefused(
            f"`{clock[0]}` in this file reads a clock. Record two `torch.cuda.Event(enable_timing=True)` "
            "and read `start.elapsed_time(end)` later, or wait only where times are read"
        )
    if other := sorted(_OTHERS & source.words):
        raise FixRefused(f"`{other[0]}` in this file may rely on it")
    if any(isinstance(one, ast.Call) for one in ast.walk(statement) if one is not statement.value):
        raise FixRefused("its argument is computed, which may have a side effect")
    edits = (_removed(source, statement),)
    check_comments(source, edits)
    return Writing(edits)


def _removed(source: SourceFile, statement: ast.Expr) -> TextEdit:
    start, end = source.start(statement), source.end(statement)
    blanks = source.indentation(statement)
    rest = source.text[end:].partition("\n")[0]
    if blanks is None or rest.strip() or len(source.block(statement)) == 1:
        return TextEdit(start, end, "pass")
    return TextEdit(start - len(blanks), end + len(rest) + (end + len(rest) < len(source.text)), "")


FIX = Fix(codes=("TT104",), equivalence="BITWISE", find=_find, write=_write)
