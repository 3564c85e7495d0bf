"""Convolutions in float64 as sums of products of the shifted input, where torch first copies each window.

torch has no float64 kernel of oneDNN: it writes all windows of a batch side by side, and for a batch of
pictures that takes longer than the products.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from torchtrim.emulator.device import current

_FORWARD = torch.ops.aten.convolution.default
_BACKWARD = torch.ops.aten.convolution_backward.default
_LEAST = 16 * 2**20
"""Least bytes of all windows where shifts are quicker, measured on two cores: by 1.5 to 5 times."""


class _Kernel(NamedTuple):
    """Sizes of a convolution: of its output, and of the grid that a stride leaves of the padded input.

    A stride of 2 splits a row into even and odd places, a phase each, and a window moves by one in a phase.
    """

    sizes: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    out: tuple[int, ...]
    grid: tuple[int, ...]

    @property
    def length(self) -> int:
        """The places of a flat grid from the first output to the last."""
        return self._flat([one - 1 for one in self.out]) + 1

    def taps(self) -> Iterator[tuple[tuple[int, ...], int]]:
        """Yield the phase of each weight of a window, and by how many places of a flat grid it is shifted."""
        for place in itertools.product(*map(range, self.sizes)):
            reach = [one * step for one, step in zip(place, self.dilation, strict=True)]
            pairs = [*zip(reach, self.stride, strict=True)]
            yield tuple(a % b for a, b in pairs), self._flat([a // b for a, b in pairs])

    def _flat(self, place: Sequence[int]) -> int:
        found = 0
        for one, size in zip(place, self.grid, strict=True):
            found = found * size + one
        return found


def shifts(func: Any, args: Sequence[Any]) -> bool:
    """Return True for a convolution, or its gradients, that shifts compute sooner than torch's kernel."""
    if func is _FORWARD:
        x, weight, transposed, groups = args[0], args[1], args[6], args[8]
    elif func is _BACKWARD:
        x, weight, transposed, groups = args[1], args[2], args[7], args[9]
    else:
        return False
    plain = x.dtype is weight.dtype is torch.float64 and x.device.type == "cpu" and x.dim() > 2
    if not plain or transposed or groups != 1 or weight[0, 0].numel() < 2 or current() is not None:
        return False
    first = 3 if func is _FORWARD else 4
    kernel = _kernel_of(x, weight, args[first : first + 3])
    windows: int = len(x) * weight[0].numel() * math.prod(kernel.out) * x.element_size()
    return windows >= _LEAST


def by_shifts(func: Any, args: Sequence[Any]) -> Any:
    """Compute a convolution, or its gradients."""
    if func is _FORWARD:
        x, weight, bias = args[:3]
        found = _convolved(x, weight, _kernel_of(x, weight, args[3:6]))
        return found if bias is None else found.add_(bias.view(-1, *[1] * (x.dim() - 2)))
    grad, x, weight = args[:3]
    kernel = _kernel_of(x, weight, args[4:7])
    wants = args[10]
    return (
        *_gradients(grad, x, weight, kernel, wants),
        grad.sum((0, *range(2, grad.dim()))) if wants[2] else None,
    )


def _kernel_of(x: Tensor, weight: Tensor, settings: Sequence[Sequence[int]]) -> _Kernel:
    sizes = tuple(weight.shape[2:])
    stride, padding, dilation = (
        tuple(one) * (len(sizes) if len(one) == 1 else 1) for one in settings
    )
    reach = [step * (size - 1) + 1 for size, step in zip(sizes, dilation, strict=True)]
    out = tuple(
        (size + 2 * more - whole) // step + 1
        for size, more, whole, step in zip(x.shape[2:], padding, reach, stride, strict=True)
    )
    grid = tuple(
        -(-((size - 1) * step + whole) // step)
        for size, step, whole in zip(out, stride, reach, strict=True)
    )
    return _Kernel(sizes, stride, padding, dilation, out, grid)


def _convolved(x: Tensor, weight: Tensor, kernel: _Kernel) -> Tensor:
    phases = _phases(x, kernel)
    weights = weight.flatten(2).permute(2, 0, 1).contiguous()
    result = x.new_empty(len(x), len(weight), math.prod(kernel.grid))
    taps, length = [*kernel.taps()], kernel.length
    # One sample at a time, whose sums stay in the processor's cache.
    for number, sums in enumerate(result[:, :, :length]):
        for index, (phase, shift) in enumerate(taps):
            values = phases[phase][number, :, shift : shift + length]
            sums.addmm_(weights[index], values, beta=float(index > 0))
    return _on_grid(result, kernel)[_of_output(kernel)].contiguous()


def _gradients(
    grad: Tensor, x: Tensor, weight: Tensor, kernel: _Kernel, wants: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None]:
    phases, taps, length = _phases(x, kernel), [*kernel.taps()], kernel.length
    weights = weight.flatten(2).permute(2, 1, 0).contiguous()
    of_weights = weights.new_zeros(len(taps), *weight.shape[:2])
    of_phases = {phase: torch.zeros_like(one) for phase, one in phases.items() if wants[0]}
    spread = grad.new_zeros(*grad.shape[:2], math.prod(kernel.grid))
    _on_grid(spread, kernel)[_of_output(kernel)] = grad
    for number, given in enumerate(spread[:, :, :length]):
        for index, (phase, shift) in enumerate(taps):
            here = number, slice(None), slice(shift, shift + length)
            if wants[0]:
                of_phases[phase][here].addmm_(weights[index], given)
            if wants[1]:
                of_weights[index].addmm_(given, phases[phase][here].T)
    return (
        _joined(of_phases, x, kernel) if wants[0] else None,
        of_weights.permute(1, 2, 0).reshape(weight.shape) if wants[1] else None,
    )


def _of_output(kernel: _Kernel) -> tuple[slice, ...]:
    return (slice(None), slice(None), *(slice(size) for size in kernel.out))


def _on_grid(flat: Tensor, kernel: _Kernel) -> Tensor:
    return flat.view(*flat.shape[:2], *kernel.grid)


def _of_phase(phase: tuple[int, ...], kernel: _Kernel) -> tuple[slice, ...]:
    pairs = zip(phase, kernel.stride, strict=True)
    return (slice(None), slice(None), *(slice(first, None, step) for first, step in pairs))


def _padding(x: Tensor, kernel: _Kernel) -> list[int]:
    """Return what `pad` adds to reach whole grids; what no window reaches is cut off."""
    sides = []
    for size, before, grid, step in zip(
        x.shape[2:], kernel.padding, kernel.grid, kernel.stride, strict=True
    ):
        sides += [grid * step - size - before, before]
    return sides[::-1]


def _phases(x: Tensor, kernel: _Kernel) -> dict[tuple[int, ...], Tensor]:
    """Return the padded input's phases, flat."""
    padded = F.pad(x, _padding(x, kernel))
    places = itertools.product(*map(range, kernel.stride))
    return {one: padded[_of_phase(one, kernel)].reshape(*x.shape[:2], -1) for one in places}


def _joined(phases: dict[tuple[int, ...], Tensor], x: Tensor, kernel: _Kernel) -> Tensor:
    """Return the gradient of an input from those of its phases."""
    whole = [size * step for size, step in zip(kernel.grid, kernel.stride, strict=True)]
    padded = x.new_empty(*x.shape[:2], *whole)
    for phase, value in phases.items():
        padded[_of_phase(phase, kernel)] = _on_grid(value, kernel)
    return F.pad(padded, [-one for one in _padding(x, kernel)])
