"""The table of kernels that eager PyTorch chooses on CUDA, each condition with its source.

It depends on the arguments, the compute capability and the version of torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from torchtrim.syncs.base import Citation, pytorch

_HALVES = (torch.float16, torch.bfloat16)
_READ_AT = "27a4844d7fb"
"""The commit of PyTorch whose lines are cited, of 2026 and before release 2.14."""


class Target(NamedTuple):
    """A CUDA device by compute capability, with the versions of torch and cuDNN that run on it."""

    capability: tuple[int, int]
    torch: tuple[int, int] = (2, 13)
    cudnn: int = 91900


class AttentionCall(NamedTuple):
    """The arguments of `scaled_dot_product_attention`. `grouped`: `enable_gqa`."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None = None
    dropout: float = 0.0
    causal: bool = False
    grouped: bool = False

    def learns(self) -> bool:
        """Return True if a backward pass may follow."""
        needed = any(one.requires_grad for one in (self.query, self.key, self.value))
        return needed and torch.is_grad_enabled()

    def width(self) -> int:
        """Return the head size of the query."""
        return self.query.shape[-1]


class Condition(NamedTuple):
    """One condition of a kernel: its words for people, the predicate, and the line that checks it."""

    words: str
    holds: Callable[[AttentionCall, Target], bool]
    source: Citation


_SDP_UTILS = "aten/src/ATen/native/transformers/cuda/sdp_utils.cpp"


def _line(line: int, note: str) -> Citation:
    return pytorch(_SDP_UTILS, line, note, ref=_READ_AT)


def _shared(line: int, note: str) -> Citation:
    """Cite a line of the header that all devices share."""
    path = "aten/src/ATen/native/transformers/sdp_utils_cpp.h"
    return pytorch(path, line, note, ref="v2.13.0")


def _same_heads(call: AttentionCall) -> bool:
    return call.query.shape[-3] == call.key.shape[-3] == call.value.shape[-3]


def _divides(call: AttentionCall, *, alike: bool) -> bool:
    heads, keys, values = (one.shape[-3] for one in call[:3])
    return not (heads % keys or heads % values) and (keys == values or not alike)


def _same_batch(call: AttentionCall) -> bool:
    return call.query.shape[0] == call.key.shape[0] == call.value.shape[0]


def _heads(
    *, grouped_since: tuple[int, int] = (0, 0), alike: bool = True
) -> Callable[[AttentionCall, Target], bool]:
    def holds(call: AttentionCall, target: Target) -> bool:
        single = target.torch >= (2, 14) and call.key.shape[-3] == call.value.shape[-3] == 1
        grouped = single or (call.grouped and target.torch >= grouped_since)
        return _same_batch(call) and (_divides(call, alike=alike) if grouped else _same_heads(call))

    return holds


def _is_dense(call: AttentionCall, *, single: bool) -> bool:
    rows = all(one.stride(-1) == 1 for one in call[:3]) or (single and call.width() == 1)
    return rows and (call.mask is None or call.mask.stride(-1) == 1)


def _fits_mask(call: AttentionCall) -> bool:
    """Return True for a mask of two or four dimensions that broadcasts and needs no gradient."""
    if (mask := call.mask) is None:
        return True
    full = (*call.query.shape[:-1], call.key.shape[-2])
    wanted = full if mask.dim() == 4 else full[-2:]
    sizes = zip(mask.shape, wanted, strict=False)
    return (
        not mask.requires_grad
        and mask.dim() in (2, 4)
        and all(size in (1, most) for size, most in sizes)
    )


def _alignment(call: AttentionCall, target: Target) -> int:
    """Return the multiple of elements that CUTLASS's matrix products need."""
    half = call.query.dtype in _HALVES
    least = 4 if target.capability[0] >= 8 else 1
    cores = target.capability[0] >= 8 or (target.capability[0] == 7 and half)
    return max(least, 128 // (16 if half else 32)) if cores else least


def _is_aligned(call: AttentionCall, target: Target) -> bool:
    step = _alignment(call, target)
    wide, values = call.width(), call.value.shape[-1]
    return (
        wide == call.key.shape[-1] and min(wide, values) > 0 and not (wide % step or values % step)
    )


def _low(call: AttentionCall, target: Target) -> bool:
    types = _HALVES if target.capability[0] >= 8 else (torch.float16,)
    return call.query.dtype in types and _same_types(call)


def _same_types(call: AttentionCall) -> bool:
    return call.query.dtype == call.key.dtype == call.value.dtype


def _types_of_efficient(call: AttentionCall, target: Target) -> bool:
    types = (torch.float16, torch.float32, torch.bfloat16)[: 3 if target.capability[0] >= 8 else 2]
    return call.query.dtype in types and _same_types(call)


def _learns_wide_heads(call: AttentionCall, target: Target) -> bool:
    consumer = (8, 6) <= target.capability <= (8, 9) or (12, 0) <= target.capability <= (12, 1)
    if not (consumer and call.learns()):
        return True
    return call.width() <= 192 or (not call.dropout and call.width() > 224)


def _cudnn_shapes(call: AttentionCall, target: Target) -> bool:
    wide, values = call.width(), call.value.shape[-1]
    server = target.capability == (9, 0) or target.capability[0] == 10
    uneven = server and target.cudnn >= 91100 and (wide, values) == (192, 128)
    most = 192 if uneven else 128
    lengths = call.key.shape[-2] != 1 and not (call.dropout and call.query.shape[-2] == 1)
    return lengths and max(wide, values) <= most and not (wide % 8 or values % 8)


_SHAPES = Condition(
    "query, key and value have four dimensions",
    lambda call, target: call.query.dim() == call.key.dim() == call.value.dim() == 4,
    _shared(323, "all fused kernels take four dimensions"),
)
_FILLED = Condition(
    "no sequence is empty",
    lambda call, target: call.query.shape[-2] > 0 and call.key.shape[-2] > 0,
    _shared(496, "rejects sequences of length zero"),
)
_LAST = "elements of a row are adjacent in memory"
_NATIVE_GROUPS = "one batch size, and heads that are equal or, with enable_gqa, divide"

CONDITIONS: Mapping[str, tuple[Condition, ...]] = {
    "flash": (
        _SHAPES,
        Condition("no mask", lambda call, target: call.mask is None, _shared(260, "takes no mask")),
        Condition(
            "one head size of at most 256",
            lambda call, target: call.width() == call.key.shape[-1] == call.value.shape[-1] <= 256,
            _line(147, "`check_head_dim_size_flash`"),
        ),
        Condition(
            "capability 8.0 to 12.1",
            lambda call, target: (8, 0) <= target.capability <= (12, 1),
            _line(298, "`check_flash_attention_hardware_support`"),
        ),
        Condition(
            "no training of heads of 193 to 224 on 8.6 to 8.9 and 12",
            _learns_wide_heads,
            _line(415, "the backward kernel needs more shared memory than these have"),
        ),
        Condition(
            "a causal mask is square",
            lambda call, target: not call.causal or call.query.shape[-2] == call.key.shape[-2],
            _line(449, "`check_flash_causal_non_square_seqlens`"),
        ),
        Condition("float16 or bfloat16", _low, _line(702, "`check_dtypes_low_precision`")),
        Condition(_NATIVE_GROUPS, _heads(), _shared(398, "flash attention supports groups")),
        _FILLED,
        Condition(_LAST, lambda call, target: _is_dense(call, single=True), _shared(512, _LAST)),
    ),
    "efficient": (
        _SHAPES,
        Condition(
            "head sizes that CUTLASS can align",
            _is_aligned,
            _line(247, "`check_head_dim_size_mem_efficient`, by `minimum_gemm_alignment` at 127"),
        ),
        _FILLED,
        Condition(_LAST, lambda call, target: _is_dense(call, single=False), _shared(512, _LAST)),
        Condition(
            "one batch size and number of heads, or with enable_gqa from 2.14 on heads that divide",
            _heads(grouped_since=(2, 14)),
            pytorch(
                _SDP_UTILS, 1149, "`supports_gqa`, which release 2.13 does not have", ref="v2.14.1"
            ),
        ),
        Condition(
            "float16 or float32, or bfloat16 from 8.0 on",
            _types_of_efficient,
            _line(877, "`less_than_sm80_mem_efficient_dtypes`"),
        ),
    ),
    "cudnn": (
        _SHAPES,
        Condition(
            "no deterministic algorithms",
            lambda call, target: (
                not torch.are_deterministic_algorithms_enabled()
                or torch.is_deterministic_algorithms_warn_only_enabled()
            ),
            _line(737, "`check_cudnn_deterministic`"),
        ),
        Condition("float16, or bfloat16 from 8.0 on", _low, _line(702, "as flash attention")),
        Condition(
            "a mask of two or four dimensions without gradient",
            lambda call, target: _fits_mask(call),
            _shared(270, "`check_attn_mask_shape`"),
        ),
        Condition(
            "capability 8.0 to 12.1",
            lambda call, target: (8, 0) <= target.capability <= (12, 1),
            _line(659, "`check_cudnn_hardware_support`"),
        ),
        Condition(
            "dropout in sixteenths",
            lambda call, target: (call.dropout * 16).is_integer(),
            _line(486, "`check_cudnn_dropout`"),
        ),
        _FILLED,
        Condition(_LAST, lambda call, target: _is_dense(call, single=True), _shared(512, _LAST)),
        Condition(_NATIVE_GROUPS, _heads(alike=False), _shared(398, "cuDNN supports groups")),
        Condition(
            "head sizes in eights up to 128, and more than one key",
            _cudnn_shapes,
            _line(498, "`check_cudnn_tensor_shapes`"),
        ),
    ),
    "math": (),
}
"""The conditions of each attention kernel."""

_BACKENDS = ("math", "flash", "efficient", "cudnn")
"""Kernels by their number in `SDPBackend`."""
_ORDER = ("flash", "efficient", "math", "cudnn")
"""The order of a new process: `ATen/Context.h`."""
_CUDNN_FIRST = ("cudnn", "flash", "efficient", "math")


def prefers_cudnn(target: Target) -> bool:
    """Return True if cuDNN's attention is tried first: `check_prefer_cudnn_attention`, line 91."""
    major, minor = target.capability
    return target.cudnn > 91500 and major in (9, 10) and minor in (0, 3)


def _priorities(target: Target) -> tuple[str, ...]:
    numbers = torch._C._get_sdp_priority_order()
    found = tuple(_BACKENDS[number] for number in numbers if number < len(_BACKENDS))
    return _CUDNN_FIRST if found == _ORDER and prefers_cudnn(target) else found


def _enabled() -> dict[str, bool]:
    settings: Any = torch.backends.cuda
    return {
        "flash": settings.flash_sdp_enabled(),
        "efficient": settings.mem_efficient_sdp_enabled(),
        "cudnn": settings.cudnn_sdp_enabled(),
        "math": settings.math_sdp_enabled(),
    }


def attention_kernel(call: AttentionCall, target: Target) -> str:
    """Return the kernel of a call, a key of `CONDITIONS`, by the script's settings. Raises torch's error."""
    enabled = _enabled()
    for name in _priorities(target):
        if enabled[name] and not refusal(name, call, target):
            return name
    why = "; ".join(
        f"{name}: needs {refusal(name, call, target)}" for name, on in enabled.items() if on
    )
    raise RuntimeError(f"No available kernel. Aborting execution. ({why or 'all are disabled'})")


def refusal(name: str, call: AttentionCall, target: Target) -> str:
    """Return the first condition of a kernel that a call does not meet, or an empty text."""
    conditions = (one for one in CONDITIONS[name] if not one.holds(call, target))
    return next((one.words for one in conditions), "")


def rows_of_logsumexp(name: str, length: int) -> tuple[int, ...]:
    """Return the last dimensions of a kernel's log-sum-exp for queries of a length.

    Efficient attention pads it to 32 (`kAlignLSE`), and cuDNN's has a last dimension of one.
    """
    if name == "efficient":
        return (math.ceil(length / 32) * 32,)
    return (length, 1) if name == "cudnn" else (length,)
