from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from torchtrim.capture.recording import record_call
from torchtrim.emulator import emulate


def rows(function: Any) -> list[str]:
    """The waits of a call on the device."""
    return [sync.row for sync in record_call(function, device="emulated").syncs]


def names(function: Any) -> list[str]:
    return [op.name for op in record_call(function, device="emulated").operators]


@settings(deadline=None, max_examples=30)
@given(size=st.integers(1, 50), p=st.floats(0.0, 1.0), seed=st.integers(0, 99))
def test_dropout_gives_the_cpus_values(size: int, p: float, seed: int) -> None:
    results = []
    for place in ("cpu", "cuda"):
        with emulate():
            x = torch.arange(1.0, size + 1).to(place).requires_grad_()
            torch.manual_seed(seed)
            y = F.dropout(x, p)
            y.sum().backward()
            assert x.grad is not None
            results.append((y.detach().cpu(), x.grad.cpu()))
    assert all(map(torch.equal, *results))


@pytest.mark.usefixtures("device")
def test_the_mask_of_dropout_is_one_byte_an_element() -> None:
    y: Any = F.dropout(torch.ones(1000, device="cuda", requires_grad=True), 0.5)
    assert y.grad_fn.name() == "NativeDropoutBackward0"
    mask = y.grad_fn._saved_result1
    assert (mask.dtype, mask.numel(), mask.is_cuda) == (torch.bool, 1000, True)
    host: Any = F.dropout(torch.ones(10, requires_grad=True), 0.5)
    assert host.grad_fn.name() != "NativeDropoutBackward0"


@pytest.mark.usefixtures("device")
def test_dropout_that_drops_nothing_or_all() -> None:
    x = torch.ones(5, device="cuda")
    assert torch.equal(F.dropout(x, 0.0), x)
    assert not F.dropout(x, 1.0).any()
    assert torch.equal(F.dropout(x, 0.5, training=False), x)
    assert F.dropout(x[:0], 0.5).is_cuda


@pytest.mark.usefixtures("device")
def test_one_hot_waits_only_to_learn_how_many() -> None:
    t = torch.tensor([1, 2], device="cuda")
    assert rows(lambda: F.one_hot(t, 4)) == []
    assert rows(lambda: F.one_hot(t)) == ["item"]
    assert rows(lambda: F.one_hot(t.cpu(), 4)) == ["copy-to-host"]


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(0, 6), max_size=8), st.integers(7, 9))
def test_one_hot_gives_the_cpus_values(labels: list[int], classes: int) -> None:
    host = torch.tensor(labels, dtype=torch.int64)
    with emulate():
        found = F.one_hot(host.cuda(), classes)
        assert found.is_cuda
        assert torch.equal(found.cpu(), F.one_hot(host, classes))


@pytest.mark.usefixtures("device")
def test_attention_with_dropout_is_fused_and_keeps_no_matrix() -> None:
    q = torch.randn(1, 2, 64, 16, device="cuda", requires_grad=True)

    def attend() -> Tensor:
        return F.scaled_dot_product_attention(q, q, q, dropout_p=0.2)

    assert "aten::_scaled_dot_product_efficient_attention" in names(attend)[0]
    before = torch.cuda.memory_allocated()
    y = attend()
    kept = torch.cuda.memory_allocated() - before
    assert kept < 2 * 64 * 64 * 4
    y.sum().backward()
    assert q.grad is not None
    assert q.grad.isfinite().all()


@pytest.mark.usefixtures("device")
def test_attention_with_dropout_and_a_mask() -> None:
    q = torch.randn(1, 2, 4, 8, device="cuda", requires_grad=True)
    allowed = torch.tensor([True, True, False, False], device="cuda").expand(4, 4)
    v = torch.eye(4, 8, device="cuda").expand(1, 2, 4, 8)
    y = F.scaled_dot_product_attention(q, q, v, attn_mask=allowed, dropout_p=0.3)
    y.sum().backward()
    assert not y[..., 2:].any()
    assert q.grad is not None
    assert q.grad.is_cuda


@pytest.mark.usefixtures("device")
def test_ctc_loss_divides_by_lengths_that_are_uploaded() -> None:
    logs = torch.randn(6, 2, 5).log_softmax(2)
    targets = torch.tensor([[1, 2], [3, 4]])
    lengths = torch.tensor([6, 6]), torch.tensor([2, 1])
    for reduction in ("mean", "sum", "none"):
        found = F.ctc_loss(logs.cuda(), targets.cuda(), *lengths, reduction=reduction)
        assert found.is_cuda
        assert torch.equal(found.cpu(), F.ctc_loss(logs, targets, *lengths, reduction=reduction))
