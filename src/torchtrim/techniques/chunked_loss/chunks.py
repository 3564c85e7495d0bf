"""Cross entropy over chunks of rows: of `hidden @ weight.T + bias`, or of existing logits.

A chunk's logits are overwritten by their probabilities and these by the gradient, so one buffer of a chunk's
size suffices. Sums use float32 if the dtype is narrower.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

_NARROW = (torch.float16, torch.bfloat16)


class LossRule(NamedTuple):
    """Arguments of `cross_entropy`, and `z_loss`, the factor of the squared logsumexp."""

    reduction: str
    ignore_index: int
    label_smoothing: float
    z_loss: float
    rows: int


def sums_type(dtype: torch.dtype) -> torch.dtype:
    """Return the accumulation dtype."""
    return torch.float32 if dtype in _NARROW else dtype


class Product:
    """Rows of `hidden @ weight.T + bias`. `wanted`: which of the three gradients are needed."""

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        wanted: tuple[bool, bool, bool],
        rows: int,
    ) -> None:
        self.classes, _ = weight.shape
        self._hidden, self._weight, self._bias = hidden, weight, bias
        self._sums = sums_type(hidden.dtype)
        shape = (min(rows, len(hidden)), self.classes)
        self._buffer = hidden.new_empty(shape)
        self._is_wide = hidden.dtype == self._sums
        self._wide = self._buffer if self._is_wide else hidden.new_empty(shape, dtype=self._sums)
        self.of_hidden = torch.empty_like(hidden) if wanted[0] else hidden.new_empty(0)
        self.of_weight = self._zeros(weight) if wanted[1] else weight.new_empty(0)
        self.of_bias = weight.new_empty(0)
        if bias is not None and wanted[2]:
            self.of_bias = self._zeros(bias)
        self._wanted = (wanted[0], wanted[1], bias is not None and wanted[2])

    def _zeros(self, like: Tensor) -> Tensor:
        return torch.zeros(like.shape, dtype=self._sums, device=like.device)

    def spans(self, rows: int) -> Iterator[tuple[int, int]]:
        """Yield ranges of at most `rows` rows."""
        count = len(self._hidden)
        return ((at, min(at + rows, count)) for at in range(0, count, rows))

    def logits(self, first: int, last: int) -> Tensor:
        """Compute logits in the accumulation dtype in the buffer, which the caller may overwrite."""
        made, hidden = self._buffer[: last - first], self._hidden[first:last]
        if self._bias is None:
            torch.mm(hidden, self._weight.t(), out=made)
        else:
            torch.addmm(self._bias, hidden, self._weight.t(), out=made)
        return made if self._is_wide else self._wide[: last - first].copy_(made)

    def take(self, first: int, last: int, gradient: Tensor) -> None:
        """Accumulate the gradients of hidden, weight and bias."""
        hidden = self._hidden[first:last]
        if self._wanted[2]:
            self.of_bias.add_(gradient.sum(0))
        if not self._is_wide:
            gradient = self._buffer[: last - first].copy_(gradient)
        if self._wanted[0]:
            torch.mm(gradient, self._weight, out=self.of_hidden[first:last])
        if self._wanted[1] and self._is_wide:
            self.of_weight.addmm_(gradient.t(), hidden)
        elif self._wanted[1]:
            self.of_weight.add_(gradient.t() @ hidden)

    def gradients(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of hidden, weight and bias, empty if not wanted, and free the buffer."""
        del self._buffer, self._wide
        dtype = self._hidden.dtype
        return self.of_hidden, self.of_weight.to(dtype), self.of_bias.to(dtype)


class ExistingLogits:
    """Rows of existing logits `(batch, classes, places)`. Their gradient is written to `into`, if given."""

    def __init__(self, logits: Tensor, into: Tensor | None = None) -> None:
        _, self.classes, self._places = logits.shape
        self._logits, self._into = logits, into
        self._sums = sums_type(logits.dtype)

    def spans(self, rows: int) -> Iterator[tuple[int, int]]:
        """Yield ranges that stay within one sample."""
        for begin in range(0, len(self._logits) * self._places, max(self._places, 1)):
            end = begin + self._places
            yield from ((at, min(at + rows, end)) for at in range(begin, end, rows))

    def logits(self, first: int, last: int) -> Tensor:
        """Return a copy of the logits in the accumulation dtype."""
        return self._of(self._logits, first, last).to(
            self._sums, copy=True, memory_format=torch.contiguous_format
        )

    def take(self, first: int, last: int, gradient: Tensor) -> None:
        """Write the gradient of these rows' logits."""
        assert self._into is not None
        self._of(self._into, first, last).copy_(gradient)

    def _of(self, whole: Tensor, first: int, last: int) -> Tensor:
        sample, begin = divmod(first, self._places)
        return whole[sample, :, begin : begin + last - first].t()


LogitSource = Product | ExistingLogits


class Targets:
    """Class and weight of each row. `total` is the sum of the weights, the divisor of a mean."""

    def __init__(
        self, target: Tensor, class_weight: Tensor | None, rule: LossRule, dtype: torch.dtype
    ) -> None:
        valid = target != rule.ignore_index
        self.index = torch.where(valid, target, 0).unsqueeze(1)
        self.valid = valid.to(dtype)
        self.class_weight = None if class_weight is None else class_weight.to(dtype)
        self.weight = self.valid
        if self.class_weight is not None:
            self.weight = self.valid * self.class_weight[self.index.squeeze(1)]
        self.total = self.weight.sum()
        self._rule = rule

    def scale(self, gradient: Tensor | None = None) -> Tensor:
        """Return the factor of each row's loss in the result, times `gradient` if given."""
        rule, scale = self._rule, torch.ones_like(self.valid)
        if rule.reduction == "mean":
            scale = torch.where(self.valid > 0, 1 / self.total, 0)
        return scale if gradient is None else scale * gradient.to(scale.dtype)


def losses(
    source: LogitSource, targets: Targets, rule: LossRule, scale: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return each row's loss and logsumexp. With `scale`, compute the gradients too."""
    loss, lse = torch.empty_like(targets.valid), torch.empty_like(targets.valid)
    for first, last in source.spans(rule.rows):
        logits = source.logits(first, last)
        one = _Chunk(targets, rule, source.classes, first, last)
        picked = logits.gather(1, one.index)
        smooth = one.smooth(logits)
        top = logits.amax(1, keepdim=True)
        sums = logits.sub_(top).exp_().sum(1, keepdim=True)
        lse[first:last] = (sums.log() + top).squeeze(1)
        loss[first:last] = one.loss(lse[first:last], picked.squeeze(1), smooth)
        if scale is not None:
            source.take(first, last, one.gradient(logits, sums, lse[first:last], scale[first:last]))
        del logits
    return loss, lse


def gradients(
    source: LogitSource, targets: Targets, rule: LossRule, lse: Tensor, scale: Tensor
) -> None:
    """Compute the gradients from the logsumexp that `losses` returned."""
    ones = torch.ones((), dtype=lse.dtype, device=lse.device)
    for first, last in source.spans(rule.rows):
        logits = source.logits(first, last)
        logits.sub_(lse[first:last].unsqueeze(1)).exp_()
        one = _Chunk(targets, rule, source.classes, first, last)
        gradient = one.gradient(logits, ones, lse[first:last], scale[first:last])
        source.take(first, last, gradient)
        del logits, gradient


def reduced(loss: Tensor, targets: Targets, rule: LossRule) -> Tensor:
    """Reduce the rows' losses."""
    if rule.reduction == "none":
        return loss
    return loss.sum() / targets.total if rule.reduction == "mean" else loss.sum()


class _Chunk:
    def __init__(
        self, targets: Targets, rule: LossRule, classes: int, first: int, last: int
    ) -> None:
        self.index = targets.index[first:last]
        self._weights = targets.class_weight
        self._rule = rule
        self._hard = (1 - rule.label_smoothing) * targets.weight[first:last]
        self._soft = rule.label_smoothing / classes * targets.valid[first:last]
        self._of_all = classes if self._weights is None else self._weights.sum()
        self._z = rule.z_loss * targets.valid[first:last]

    def smooth(self, logits: Tensor) -> Tensor | None:
        """Return the class-weighted sum of the logits for label smoothing, or None."""
        if not self._rule.label_smoothing:
            return None
        return logits.sum(1) if self._weights is None else logits @ self._weights

    def loss(self, lse: Tensor, picked: Tensor, smooth: Tensor | None) -> Tensor:
        found = torch.where(self._hard > 0, self._hard * (lse - picked), 0)
        if smooth is not None:
            found += self._soft * (lse * self._of_all - smooth)
        if self._rule.z_loss:
            found += self._z * lse.square()
        return found

    def gradient(self, powers: Tensor, sums: Tensor, lse: Tensor, scale: Tensor) -> Tensor:
        """Turn `powers`, the exponentials times `sums`, into the gradient of the logits in place."""
        of_all = self._hard
        if self._rule.label_smoothing:
            of_all = of_all + self._soft * self._of_all
        if self._rule.z_loss:
            of_all = of_all + 2 * self._z * lse
        powers.mul_((of_all * scale).unsqueeze(1) / sums)
        powers.scatter_add_(1, self.index, -(self._hard * scale).unsqueeze(1))
        if self._rule.label_smoothing:
            soft = self._soft * scale
            if self._weights is None:
                powers.sub_(soft.unsqueeze(1))
            else:
                powers.addr_(soft, self._weights, alpha=-1)
        return powers
