"""Images taken apart into windows, shifted or not, and put together again.

Liu et al., "Swin Transformer: Hierarchical Vision Transformer using Shifted Windows", ICCV 2021.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

Size = tuple[int, int]


class Parted(NamedTuple):
    """`windows` (B n, height width, C); `mask` (n, L, L), True where two tokens were neighbours
    before the shift, None without one; the padded image's size, the window's and the shift."""

    windows: Tensor
    mask: Tensor | None
    padded: Size
    window: Size
    shift: Size


def parted(x: Tensor, window: Size, shift: Size) -> Parted:
    """The windows of images (B, H, W, C), which are padded to whole ones and rolled by the shift.

    An axis along which one window covers everything is not shifted.
    """
    right, down = -x.shape[2] % window[1], -x.shape[1] % window[0]
    x = F.pad(x, (0, 0, 0, right, 0, down))
    padded = (x.shape[1], x.shape[2])
    rows, columns = (
        0 if size >= whole else by for size, whole, by in zip(window, padded, shift, strict=True)
    )
    shifted = (rows, columns)
    if any(shifted):
        x = x.roll((-shifted[0], -shifted[1]), (1, 2))
    mask = _mask(padded, window, shifted, x.device) if any(shifted) else None
    return Parted(_cut(x, window), mask, padded, window, shifted)


def joined(windows: Tensor, parts: Parted, shape: torch.Size) -> Tensor:
    """Images of a shape (B, H, W, C), of windows that were taken from them."""
    (height, width), (rows, columns) = parts.window, parts.padded
    x = windows.view(-1, rows // height, columns // width, height, width, windows.shape[-1])
    x = x.transpose(2, 3).reshape(-1, rows, columns, windows.shape[-1])
    if any(parts.shift):
        x = x.roll(parts.shift, (1, 2))
    return x[:, : shape[1], : shape[2]].contiguous()


def _cut(x: Tensor, window: Size) -> Tensor:
    (height, width), (batch, rows, columns, _) = window, x.shape
    x = x.reshape(batch, rows // height, height, columns // width, width, -1)
    return x.transpose(2, 3).reshape(-1, height * width, x.shape[-1])


def _mask(padded: Size, window: Size, shift: Size, device: torch.device) -> Tensor:
    bands = [
        (torch.arange(size, device=device) >= size - one).long()
        + (torch.arange(size, device=device) >= size - by)
        if by
        else torch.zeros(size, dtype=torch.long, device=device)
        for size, one, by in zip(padded, window, shift, strict=True)
    ]
    region = bands[0][:, None] * 3 + bands[1]
    tokens = _cut(region[None, :, :, None], window)[..., 0]
    return tokens[:, :, None] == tokens[:, None, :]
