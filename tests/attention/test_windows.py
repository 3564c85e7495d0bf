"""Windows are cut as Swin cuts them, and joined to the image that they came from."""

import pytest
import torch

from torchtrim.attention.windows import joined, parted


@pytest.mark.parametrize("size", [(8, 10), (7, 11), (4, 5), (3, 20)])
@pytest.mark.parametrize("shift", [(0, 0), (2, 2), (1, 3)])
def test_joined_is_what_was_parted(size: tuple[int, int], shift: tuple[int, int]) -> None:
    x = torch.randn(2, *size, 3)
    parts = parted(x, (4, 5), shift)
    assert parts.windows.shape[1:] == (20, 3)
    assert torch.equal(joined(parts.windows, parts, x.shape), x)


def test_a_mask_parts_tokens_that_the_shift_brought_together() -> None:
    places = torch.arange(64.0).view(1, 8, 8, 1)
    parts = parted(places, (4, 4), (2, 2))
    assert parts.mask is not None
    assert parts.mask.shape == (4, 16, 16)
    assert parts.mask[0].all()
    last = parts.windows[3, :, 0]
    rows, columns = last // 8, last % 8
    together = (rows[:, None] - rows).abs().lt(4) & (columns[:, None] - columns).abs().lt(4)
    assert torch.equal(parts.mask[3], together)


def test_one_window_is_not_shifted() -> None:
    parts = parted(torch.randn(1, 4, 5, 2), (4, 5), (2, 2))
    assert parts.mask is None
    assert parts.shift == (0, 0)
