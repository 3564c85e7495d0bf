"""Attention as on CUDA: the operator that a device chooses and what is saved, with the CPU's values."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch._C import DispatchKey, DispatchKeySet

from torchtrim.dispatch.modes import is_dry
from torchtrim.emulator.kernels import AttentionCall, rows_of_logsumexp

_aten: Any = torch.ops.aten
_PYTHON = DispatchKeySet(DispatchKey.Python) | DispatchKeySet(DispatchKey.PythonTLSSnapshot)
_UNSEEN = _PYTHON | DispatchKeySet(DispatchKey.AutocastCPU)
_MASK_ALIGNMENT = 8  # Elements, `preprocess_mask` in `transformers/attention.cpp`.
_HEAD_ALIGNMENT = 8  # Elements, `pad_last_dim` in the same file.
_NUMBERS = itertools.count(1)
_STATES: dict[int, torch.Tensor] = {}  # Random states that backward passes draw from again.
_FREED: deque[int] = deque()
_FREED_LIMIT = 2048  # Of 5 KB each. A copy of a freed seed may be read still: it was offloaded.


@contextlib.contextmanager
def plain_kernels(*, grad: bool = False) -> Iterator[None]:
    """Run operators of the CPU that no mode sees, with or without autograd."""
    include = torch._C._dispatch_tls_local_include_set()
    with torch._C._ForceDispatchKeyGuard(include, _UNSEEN), torch.set_grad_enabled(grad):
        yield


class _Arguments(NamedTuple):
    """The arguments that all fused kernels share."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    bias: torch.Tensor | None
    dropout: float
    causal: bool
    scale: float | None

    def is_flash_on_cpu(self) -> bool:
        """Return True if the CPU's fused kernel takes the call: `use_flash_attention_cpp`."""
        query, key, value = self[:3]
        heads, keys, values = (one.shape[1] for one in self[:3])
        return (
            not self.dropout
            and query.shape[-1] == key.shape[-1] == value.shape[-1]
            and keys == values
            and heads % keys == 0
            and all(one.stride(-1) == 1 for one in (query, key, value))
            and not (self.bias is not None and self.bias.requires_grad)
        )

    def as_math(self) -> torch.Tensor:
        """Attention by products and a softmax, as the CPU runs what its fused kernel does not take."""
        return as_math(*self, grouped=self.query.shape[1] != self.key.shape[1])

    def copied(self) -> _Arguments:
        """Return the call with copies of its tensors."""
        query, key, value = (one.detach().clone() for one in (self.query, self.key, self.value))
        bias = None if self.bias is None else self.bias.detach().clone()
        return self._replace(query=query, key=key, value=value, bias=bias)

    def run(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the CPU's output, and the log-sum-exp of each row where its fused kernel runs."""
        with plain_kernels():
            if not self.is_flash_on_cpu():
                return self.as_math(), None
            query, key, value, bias, dropout, causal, scale = self
            return _aten._scaled_dot_product_flash_attention_for_cpu(  # type: ignore[no-any-return]
                query, key, value, dropout, causal, attn_mask=bias, scale=scale
            )

    def gradients(
        self, grad_out: torch.Tensor, out: torch.Tensor, logsumexp: torch.Tensor, number: int
    ) -> list[torch.Tensor | None]:
        """Return the CPU's gradients of query, key, value and bias. `number`: of the random state."""
        if self.is_flash_on_cpu():
            query, key, value, bias, dropout, causal, scale = self
            with plain_kernels():
                found = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
                    *(grad_out, query, key, value, out, logsumexp, dropout, causal),
                    attn_mask=bias,
                    scale=scale,
                )
            return [*found, None]
        return self._rerun(grad_out, number)

    def _rerun(self, grad_out: torch.Tensor, number: int) -> list[torch.Tensor | None]:
        """Run the forward pass again with its random numbers, and the CPU's autograd."""
        with plain_kernels(grad=True), drawing_again(number):
            query, key, value = inputs = [
                one.detach().requires_grad_() for one in (self.query, self.key, self.value)
            ]
            bias = None if self.bias is None else self.bias.detach().requires_grad_()
            out = self._replace(query=query, key=key, value=value, bias=bias).as_math()
            inputs += [] if bias is None else [bias]
            return [*torch.autograd.grad(out, inputs, grad_out), None][:4]


@contextlib.contextmanager
def drawing_again(number: int) -> Iterator[None]:
    """Draw from the default generator what the numbered forward pass drew.

    Raises RuntimeError if its random state is no longer known.
    """
    if not number:
        yield
        return
    if number not in _STATES:
        raise RuntimeError(
            "an emulated kernel cannot draw in backward what it drew in forward: "
            f"{_FREED_LIMIT} later kernels that draw have freed their seeds; run backward earlier"
        )
    now = torch.default_generator.get_state()
    torch.default_generator.set_state(_STATES[number])
    try:
        yield
    finally:
        torch.default_generator.set_state(now)


def numbered(dropout: float) -> int:
    """Return a number for the random state, which is kept if the kernel draws; else 0."""
    if not dropout:
        return 0
    number = next(_NUMBERS)
    _STATES[number] = torch.default_generator.get_state()
    return number


def kept_with(seed: torch.Tensor, number: int) -> torch.Tensor:
    """Return the seed, whose storage keeps the numbered random state."""
    if number:
        weakref.finalize(seed.untyped_storage(), _free, number)
    return seed


def _free(number: int) -> None:
    _FREED.append(number)
    if len(_FREED) > _FREED_LIMIT:
        _STATES.pop(_FREED.popleft(), None)


def _in_layout(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or a copy with the strides of `like`."""
    return tensor if tensor.stride() == like.stride() else like.copy_(tensor)


def _empty_in_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return an empty tensor with the heads of a position adjacent."""
    batch, heads, length, width = tensor.shape
    return tensor.new_empty((batch, length, heads, width)).transpose(1, 2)


def _logsumexp(name: str, query: torch.Tensor, found: torch.Tensor | None) -> torch.Tensor:
    """Return the log-sum-exp in the shape of a kernel; zeros where the CPU's kernel has none."""
    length = query.shape[-2]
    shape = (*query.shape[:-2], *rows_of_logsumexp(name, length))
    result = query.new_zeros(shape, dtype=torch.float32)
    if found is not None:
        result[:, :, :length].copy_(found.view_as(result[:, :, :length]))
    return result


def flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """FlashAttention, with the state of its random numbers on the device."""
    number = numbered(dropout_p)
    out, sums = _Arguments(query, key, value, None, dropout_p, is_causal, scale).run()
    state = torch.tensor([number, 0], dtype=torch.uint64, device="cpu")
    unused = torch.zeros((), dtype=torch.uint64, device="cpu")
    return (
        _in_layout(out, torch.empty_like(query)),
        _logsumexp("flash", query, sums),
        *(None, None, query.shape[-2], key.shape[-2]),
        *(kept_with(state, number), unused, query.new_empty(0)),
    )


def flash_backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    cum_seq_q: None,
    cum_seq_k: None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: torch.Tensor,
    philox_offset: torch.Tensor,
    *,
    scale: float | None = None,
) -> tuple[torch.Tensor, ...]:
    """The gradients of `flash`."""
    call = _Arguments(query, key, value, None, dropout_p, is_causal, scale)
    number = int(philox_seed[0]) if dropout_p else 0
    return _like_inputs(call, call.gradients(grad_out, out, logsumexp, number))


def _like_inputs(
    call: _Arguments, gradients: list[torch.Tensor | None]
) -> tuple[torch.Tensor, ...]:
    pairs = zip(gradients, call[:3], strict=False)
    return tuple(
        _in_layout(one, torch.empty_like(source)) for one, source in pairs if one is not None
    )


def cudnn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_bias: torch.Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """Attention of cuDNN, with seed and offset on the device."""
    number = numbered(dropout_p)
    out, sums = _Arguments(query, key, value, attn_bias, dropout_p, is_causal, scale).run()
    seed = torch.tensor(number, dtype=torch.int64, device="cpu")
    in_order = sorted(range(4), key=query.stride, reverse=True)
    like = torch.empty_permuted(out.shape, in_order, dtype=out.dtype, device="cpu")
    return (
        _in_layout(out, like),
        _logsumexp("cudnn", query, sums) if compute_log_sumexp else None,
        *(None, None, query.shape[-2], key.shape[-2]),
        *(kept_with(seed, number), torch.zeros((), dtype=torch.int64, device="cpu"), None),
    )


def cudnn_backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    philox_seed: torch.Tensor,
    philox_offset: torch.Tensor,
    attn_bias: torch.Tensor | None,
    cum_seq_q: None,
    cum_seq_k: None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    *,
    scale: float | None = None,
) -> tuple[torch.Tensor, ...]:
    """The gradients of `cudnn`."""
    call = _Arguments(query, key, value, attn_bias, dropout_p, is_causal, scale)
    number = int(philox_seed) if dropout_p else 0
    return _like_inputs(call, call.gradients(grad_out, out, logsumexp.squeeze(-1), number))


def efficient(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_bias: torch.Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[torch.Tensor, ...]:
    """Memory-efficient attention."""
    number = numbered(dropout_p)
    out, sums = _Arguments(query, key, value, attn_bias, dropout_p, is_causal, scale).run()
    seed = torch.tensor(number, dtype=torch.int64, device="cpu")
    rows = _logsumexp("efficient", query, sums) if compute_log_sumexp else None
    return (
        _in_layout(out, _empty_in_rows(out)),
        query.new_empty((*query.shape[:-2], 0), dtype=torch.float32) if rows is None else rows,
        kept_with(seed, number),
        torch.zeros((), dtype=torch.int64, device="cpu"),
    )


def efficient_backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_bias: torch.Tensor | None,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    philox_seed: torch.Tensor,
    philox_offset: torch.Tensor,
    dropout_p: float,
    grad_input_mask: list[bool],
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[torch.Tensor | None, ...]:
    """The gradients of `efficient`."""
    call = _Arguments(query, key, value, attn_bias, dropout_p, is_causal, scale)
    number = int(philox_seed) if dropout_p else 0
    rows = logsumexp[..., : query.shape[-2]]
    *first, bias = call.gradients(grad_out, out, rows, number)
    made = (None if one is None else _in_layout(one, _empty_in_rows(one)) for one in first)
    return *made, bias if grad_input_mask[3] else None


KERNELS: dict[str, Any] = {
    "_scaled_dot_product_flash_attention": flash,
    "_scaled_dot_product_flash_attention_backward": flash_backward,
    "_scaled_dot_product_cudnn_attention": cudnn,
    "_scaled_dot_product_cudnn_attention_backward": cudnn_backward,
    "_scaled_dot_product_efficient_attention": efficient,
    "_scaled_dot_product_efficient_attention_backward": efficient_backward,
}
"""Kernels for the CPU of operators that torch has only for CUDA."""


def attend(kernel: str, call: AttentionCall, scale: float | None) -> torch.Tensor:
    """Run a call by the operator of a kernel, with the preparations that torch makes for it."""
    query, key, value, mask, dropout, causal, grouped = call
    bias = _added(mask, query)
    learns = call.learns()
    if kernel == "flash":
        return _padded_flash(call, scale)
    if kernel == "cudnn":
        return _first(
            _aten._scaled_dot_product_cudnn_attention(
                query, key, value, bias, learns, dropout, causal, False, scale=scale
            )
        )
    if kernel == "efficient":
        if bias is not None:
            bias = _aligned(bias).expand(*query.shape[:-1], key.shape[-2])
        return _first(
            _aten._scaled_dot_product_efficient_attention(
                query, key, value, bias, learns, dropout, causal, scale=scale
            )
        )
    arguments = _Arguments(query, key, value, bias, dropout, causal, scale)
    if is_dry():
        return as_math(*arguments, grouped=grouped)
    return _with_fused_values(arguments, grouped=grouped)


def _with_fused_values(call: _Arguments, *, grouped: bool) -> torch.Tensor:
    """Run the operators of the math kernel, with the values of the CPU's fused kernel.

    So the device's operators and memory show, and the results are as on the CPU.
    """
    query, key, value = sources = [one.view_as(one) for one in (call.query, call.key, call.value)]
    named = call._replace(query=query, key=key, value=value)
    out = as_math(*named, grouped=grouped)
    with plain_kernels():
        kept = call.copied()
        values, sums = kept.run()
        out.data.copy_(values)
    if out.requires_grad:
        _give_fused_gradients(kept, out, sources, values, sums)
    return out


def _give_fused_gradients(
    kept: _Arguments,
    out: torch.Tensor,
    sources: list[torch.Tensor],
    values: torch.Tensor,
    sums: torch.Tensor | None,
) -> None:
    """Overwrite the gradients of the sources by the results of the CPU's fused kernel."""
    assert sums is not None
    gradients: list[torch.Tensor | None] = []

    def compute(grad_out: torch.Tensor) -> None:
        with plain_kernels():
            gradients[:] = kept.gradients(grad_out.detach(), values, sums, 0)

    def giving(at: int) -> Callable[[torch.Tensor], None]:
        def give(gradient: torch.Tensor) -> None:
            exact, gradients[at] = gradients[at], None
            if exact is not None:
                with plain_kernels():
                    gradient.detach().copy_(exact)

        return give

    listen: Any = torch.Tensor.register_hook
    listen(out, compute)
    for at, source in enumerate(sources):
        if source.requires_grad:
            listen(source, giving(at))


def as_math(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    dropout: float,
    causal: bool,
    scale: float | None,
    *,
    grouped: bool,
) -> torch.Tensor:
    """Run the C++ composite of the math kernel."""
    func = _aten._scaled_dot_product_attention_math.default
    arguments = (query, key, value, bias, dropout, causal, None)
    options = {"scale": scale, "enable_gqa": grouped}
    return _first(func._op_dk(DispatchKey.CompositeImplicitAutograd, *arguments, **options))


def _first(results: Any) -> torch.Tensor:
    out: torch.Tensor = results[0]
    return out


def _padded_flash(call: AttentionCall, scale: float | None) -> torch.Tensor:
    """Pad head sizes to a multiple of 8, which the backward pass then saves."""
    size = call.width()
    scale = size**-0.5 if scale is None and size % _HEAD_ALIGNMENT else scale
    padded = [_padded(one, _HEAD_ALIGNMENT) for one in call[:3]]
    results = _aten._scaled_dot_product_flash_attention(
        *padded, call.dropout, call.causal, False, scale=scale
    )
    out = _first(results)
    return out if out.shape[-1] == size else out[..., :size]


def _padded(tensor: torch.Tensor, step: int) -> torch.Tensor:
    missing = -tensor.shape[-1] % step
    return torch.nn.functional.pad(tensor, (0, missing)) if missing else tensor


def _added(mask: torch.Tensor | None, query: torch.Tensor) -> torch.Tensor | None:
    """Return a mask of numbers to add to the scores."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, -torch.inf)


def _aligned(bias: torch.Tensor) -> torch.Tensor:
    """Return the mask, or a view of a padded copy with rows at multiples of `_MASK_ALIGNMENT`."""
    steps = bias.stride()
    if steps[-1] == 1 and not any(step % _MASK_ALIGNMENT for step in steps[:-1]):
        return bias
    length = bias.shape[-1]
    missing = _MASK_ALIGNMENT - length % _MASK_ALIGNMENT
    return torch.nn.functional.pad(bias, (0, missing))[..., :length]
