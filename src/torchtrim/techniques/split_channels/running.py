"""Runs a BatchNorm and the modules after it in parts of the channels, and again in backward."""

from __future__ import annotations

import operator
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional

from torchtrim.capture.modules import HOOKS
from torchtrim.errors import ApplyFailed
from torchtrim.executor.autograd import casting, only_once
from torchtrim.executor.block_state import BlockState
from torchtrim.executor.chains import Range, Ranges, Run, one_by_one
from torchtrim.executor.notices import say_once
from torchtrim.executor.ordinals import unnumbered
from torchtrim.executor.places import ModulePart
from torchtrim.executor.registry import Handle
from torchtrim.executor.swap import Swapped, is_of_another
from torchtrim.techniques.split_channels.places import layout_of, spans_of

_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def split(where: str, part: ModulePart, parts: int, *, overwrites: bool) -> Handle:
    """Make a BatchNorm, or a range that begins with one, run in parts of the channels, if it has no hooks."""
    modules = [part.module] if part.span is None else list(part.chain)[slice(*part.span)]
    norm = modules[0] if modules else None
    if not isinstance(norm, _NORMS):
        raise ApplyFailed(
            f"`{where}` does not begin with a BatchNorm, so split_channels cannot run it in parts of its "
            "channels. Plan again."
        )
    state = BlockState(modules, where)
    if any(getattr(one, name) for top in modules for one in top.modules() for name in HOOKS):
        raise ApplyFailed(
            f"`{where}` has hooks, which would see some channels at a time. Remove it from the plan."
        )
    channels = _Channels(norm, tuple(modules[1:]), parts, overwrites, state, _Holders())
    if part.span is None:
        return Swapped(norm, channels.wrapped)
    return Ranges(part.chain, [Range(*part.span, channels.run, where)])


class _Holders:
    """Counts what holds an input in backward: others of the program would see it overwritten."""

    def __init__(self) -> None:
        self._fewest: tuple[int, ...] = ()

    def are_more(self, given: Tensor, references: int) -> bool:
        """Return True if more hold the input, or its storage, than the fewest seen so far."""
        storage = torch._C._storage_Use_Count(given.untyped_storage()._cdata)
        now = references, given._use_count(), storage  # type: ignore[attr-defined]
        self._fewest = tuple(map(min, self._fewest or now, now))
        return any(map(operator.gt, now, self._fewest))


class _Channels(NamedTuple):
    """A norm and the modules after it. `overwrites`: the gradient is written over the input."""

    norm: nn.modules.batchnorm._BatchNorm
    others: tuple[nn.Module, ...]
    parts: int
    overwrites: bool
    state: BlockState
    holders: _Holders

    def wrapped(self, forward: Run) -> Run:
        return forward if is_of_another(forward, self.norm) else partial(self.run, forward)

    def run(self, forward: Run, given: Any) -> Any:
        if not self._may_split(given):
            return forward(given)
        weight, bias = self.norm.weight, self.norm.bias
        if not any(one is not None and one.requires_grad for one in (given, weight, bias)):
            return forward(given)
        if self.others and (why := self.state.why_once()):
            self.state.says_once(why)
            return forward(given)
        return _ChannelParts.apply(self, forward, given, weight, bias)  # type: ignore[no-untyped-call]

    def _may_split(self, given: Any) -> bool:
        graded = torch.is_grad_enabled()
        if not graded or type(given) is not Tensor or not self.norm.training or given.dim() < 3:
            return False
        several = given.shape[1] > 1 and given.shape[2:].numel() > 1
        return several and _layout(given) is not None and given.shape[1] == self.norm.num_features

    def whole(self, forward: Run, given: Tensor) -> Tensor:
        """Return the result without gradients; running statistics are updated."""
        if not self.others:
            made: Tensor = forward(given)
            return made
        running, momentum = _counted(self.norm)
        whole: Tensor | None = None
        with unnumbered() as as_before:
            for span in self.spans(given):
                statistics = [None if one is None else one[slice(*span)] for one in running]
                owned = [_cut(one, span) for one in (self.norm.weight, self.norm.bias)]
                some = _copy_of(given, span)
                with as_before(span[0] == 0):
                    made = self.part(some, owned, statistics, momentum)
                del some
                if whole is None:
                    shape = (made.shape[0], given.shape[1], *made.shape[2:])
                    layout = _layout(made) or torch.contiguous_format
                    whole = torch.empty(
                        shape, dtype=made.dtype, device=made.device, memory_format=layout
                    )
                whole[:, slice(*span)] = made
                del made
        assert whole is not None
        return whole

    def part(
        self,
        given: Tensor,
        owned: Sequence[Tensor | None],
        statistics: Sequence[Tensor | None],
        momentum: float,
    ) -> Tensor:
        (mean, variance), (weight, bias), eps = statistics, owned, self.norm.eps
        made = functional.batch_norm(
            given, mean, variance, weight, bias, training=True, momentum=momentum, eps=eps
        )
        result: Tensor = one_by_one(self.others, made)
        return result

    def spans(self, given: Tensor) -> tuple[tuple[int, int], ...]:
        layout = layout_of(given.shape, given.stride())
        assert layout is not None
        return spans_of(given.shape[1], layout, self.parts)


class _ChannelParts(torch.autograd.Function):
    """A norm and the modules after it; only its input is saved."""

    @staticmethod
    def forward(
        ctx: Any,
        channels: _Channels,
        forward: Run,
        given: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
    ) -> Tensor:
        ctx.channels, ctx.cast = channels, casting(given.device.type)
        ctx.save_for_backward(given, weight, bias)
        ctx.before = channels.state.begin(tensors=False)
        made = channels.whole(forward, given)
        ctx.before.has_run()
        ctx.layout = _layout(made)
        return made

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        only_once("split_channels")
        channels: _Channels = ctx.channels
        given, *owned = ctx.saved_tensors
        over = channels.overwrites and not given.is_leaf
        over = over and not torch._C._autograd._get_current_graph_task_keep_graph()
        if over and channels.holders.are_more(given, sys.getrefcount(given)):
            over = False
            say_once(channels.state.where, _HELD)
        given = given.detach()
        of_given, *of_owned = ctx.needs_input_grad[2:]
        found = [(given if over else torch.empty_like(given)) if of_given else None]
        for one, want in zip(owned, of_owned, strict=True):
            found.append(torch.empty_like(one) if want else None)
        # In another layout than the result, torch sums with loops that depend on all channels.
        as_made = _layout(gradient) is ctx.layout
        spans = channels.spans(given) if as_made else ((0, given.shape[1]),)
        with ctx.before.again():
            for span in spans:
                part, comes = _copy_of(given, span), _copy_of(gradient, span)
                inputs = [part, *(_cut(one, span) for one in owned)]
                with ctx.cast():
                    made = _gradients(channels, inputs, [one is not None for one in found], comes)
                del part, inputs, comes
                for place, whole in enumerate(found):
                    if whole is not None:
                        some = whole[slice(*span)] if place else whole[:, slice(*span)]
                        some.copy_(made.pop(0))
        return None, None, *found


_HELD = "its input is also referenced by a hook, a variable or another operator, so it is not overwritten."


def _gradients(
    channels: _Channels, inputs: list[Any], wanted: Sequence[bool], comes: Tensor
) -> list[Tensor]:
    """Return the requested gradients of some channels: of the input, weight and bias. Empties `inputs`."""
    asked = [one.requires_grad_() for one, want in zip(inputs, wanted, strict=True) if want]
    with torch.enable_grad():
        made = channels.part(inputs[0], inputs[1:], (None, None), 0.0)
    edge = get_gradient_edge(made)
    del made
    inputs.clear()
    return list(torch.autograd.grad(edge, asked, comes))


def _counted(
    norm: nn.modules.batchnorm._BatchNorm,
) -> tuple[tuple[Tensor | None, Tensor | None], float]:
    """Count a batch as BatchNorm's forward does, and return its statistics and the momentum."""
    if not norm.track_running_stats:
        return (None, None), norm.momentum or 0.0
    seen = norm.num_batches_tracked
    if seen is not None:
        seen.add_(1)
    momentum = norm.momentum
    if momentum is None:
        momentum = 0.0 if seen is None else 1.0 / float(seen)
    return (norm.running_mean, norm.running_var), momentum


def _layout(tensor: Tensor) -> torch.memory_format | None:
    """Return the memory format of a tensor: contiguous, or channels last."""
    layout = layout_of(tensor.shape, tensor.stride())
    if layout == "contiguous":
        return torch.contiguous_format
    return _LAST[tensor.dim()] if layout else None


def _copy_of(tensor: Tensor, span: tuple[int, int]) -> Tensor:
    """Return a copy of some channels in the layout of the whole, or a view if that is neither format."""
    some, layout = tensor[:, slice(*span)], _layout(tensor)
    return some if layout is None else some.clone(memory_format=layout)


def _cut(tensor: Tensor | None, span: tuple[int, int]) -> Tensor | None:
    return None if tensor is None else tensor.detach()[slice(*span)]
