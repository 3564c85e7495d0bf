"""Copies between the host and the emulated device: `.to`, `.cuda()` and `.cpu()`."""

from __future__ import annotations

from typing import Any

import torch

from torchtrim.emulator.mode import Accelerator

_TO_COPY = torch.ops.aten._to_copy.default


def is_cuda(device: Any) -> bool:
    """Return True if a device, its name or its number means the emulated device."""
    if device is None:
        return False
    named = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if named.type != "cuda":
        return False
    check_index(named.index)
    return True


_count = 1  # Devices in this process: one, or one number for each rank.


def emulate_devices(count: int) -> None:
    """Accept `count` device numbers in this process, one of `count` ranks. All mean its own device."""
    global _count
    _count = count


def devices() -> int:
    """Return the number of devices."""
    return _count


def check_index(index: int | None) -> None:
    """Raise CUDA's error for a missing device."""
    if index is not None and not 0 <= index < _count:
        emulated = "one device is" if _count == 1 else f"{_count} devices are"
        raise RuntimeError(f"CUDA error: invalid device ordinal: {index}; {emulated} emulated")


class _Move(torch.autograd.Function):
    """A copy whose gradient is copied back to the source's device."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, mover: DeviceMover, on: bool, options: Any) -> Any:
        ctx.mover, ctx.on, ctx.dtype = mover, mover.tags.on_device(tensor), tensor.dtype
        return mover.copied(tensor, on, options)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return ctx.mover.moved(gradient, ctx.on, dtype=ctx.dtype), None, None, None


class DeviceMover:
    """Moves tensors between an accelerator and the host."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.tags = accelerator.tags
        self._moving = accelerator.moving

    def moved(
        self,
        tensor: torch.Tensor,
        on: bool,
        *,
        dtype: torch.dtype | None = None,
        copy: bool = False,
        **options: Any,
    ) -> torch.Tensor:
        """Return the tensor on the device (`on`) or the host, itself if it already matches."""
        here = self.tags.on_device(tensor) == on
        if here and not copy and (dtype is None or dtype == tensor.dtype):
            layout = options.get("memory_format") or torch.preserve_format
            if layout == torch.preserve_format or tensor.is_contiguous(memory_format=layout):
                return tensor
        if dtype is not None:
            options["dtype"] = dtype
        if not here and tensor.requires_grad and torch.is_grad_enabled():
            move: Any = _Move.apply
            moved: torch.Tensor = move(tensor, self, on, options)
            return moved
        return self.copied(tensor, on, options)

    def copied(self, tensor: torch.Tensor, on: bool, options: dict[str, Any]) -> torch.Tensor:
        """Return a copy on the device or the host."""
        pinned = not on and options.get("non_blocking", False)
        former, self._moving.target = self._moving.target, on
        try:
            result: torch.Tensor = _TO_COPY(tensor, **options)
        finally:
            self._moving.target = former
        if on:
            self.tags.put(result)
        elif pinned:
            self.tags.pin(result)
        return result

    def to(self, tensor: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return `tensor.to(*args, **kwargs)`, or NotImplemented if no device is involved."""
        device, dtype, rest = _request(args, kwargs)
        on = self.tags.on_device(tensor)
        if isinstance(device, torch.Tensor):
            dtype, target = device.dtype, self.tags.on_device(device)
        elif device is None:
            target = on
        else:
            if isinstance(device, str | torch.device) and torch.device(device).type == "meta":
                return NotImplemented
            target = is_cuda(device)
        if not on and not target:
            return NotImplemented
        return self.moved(tensor, target, dtype=dtype, **rest)


def _request(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, torch.dtype | None, dict[str, Any]]:
    """Parse a call of `Tensor.to` into device or other tensor, dtype, and options."""
    rest = dict(kwargs)
    device = rest.pop("device", rest.pop("other", None))
    dtype = rest.pop("dtype", None)
    values = list(args)
    if values and not isinstance(values[0], torch.dtype):
        device = values.pop(0)
    if values and (values[0] is None or isinstance(values[0], torch.dtype)):
        dtype = values.pop(0)
    for name, value in zip(("non_blocking", "copy"), values, strict=False):
        rest[name] = value
    return device, dtype, {name: value for name, value in rest.items() if value is not None}
