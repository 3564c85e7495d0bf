"""Linear and cross entropy in chunks give what PyTorch gives, gradients too, and torch knows them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from draws import some
from torchtrim.errors import ApplyFailed
from torchtrim.techniques.chunked_loss.ops import chunked_cross_entropy, linear_cross_entropy

ROWS, WIDTH, CLASSES = 37, 16, 50
CASES = list(
    product(
        ("mean", "sum", "none"),
        (0.0, 0.1),
        (False, True),
        (False, True),
        (torch.float64, torch.float32),
    )
)
Loss = Callable[..., Tensor]


def graded(loss: Loss, tensors: list[Tensor | None], gradient: Tensor) -> list[Tensor]:
    """The loss and the gradients of the tensors."""
    own = [None if one is None else one.clone().requires_grad_() for one in tensors]
    made = loss(*own)
    made.backward(gradient.to(made.dtype))
    return [made.detach(), *(one.grad for one in own if one is not None and one.grad is not None)]


def given(dtype: torch.dtype, bias: bool) -> tuple[list[Tensor | None], Tensor]:
    """Hidden states, weight, bias, and targets of which some are to be ignored."""
    torch.manual_seed(0)
    shapes = ((ROWS, WIDTH), (CLASSES, WIDTH), (CLASSES,))
    hidden, weight, own = (torch.randn(shape, dtype=dtype) for shape in shapes)
    target = torch.randint(0, CLASSES, (ROWS,))
    target[::5] = -100
    return [hidden, weight, own if bias else None], target


@pytest.mark.parametrize(("reduction", "smooth", "weighted", "bias", "dtype"), some(CASES))
def test_both_give_what_cross_entropy_gives(
    reduction: str, smooth: float, weighted: bool, bias: bool, dtype: torch.dtype
) -> None:
    tensors, target = given(dtype, bias)
    weight = torch.rand(CLASSES, dtype=dtype) if weighted else None
    gradient = torch.randn(ROWS) if reduction == "none" else torch.tensor(2.5)
    rule: dict[str, Any] = {"reduction": reduction, "label_smoothing": smooth}
    ours: dict[str, Any] = {"class_weight": weight, "rows": 8, **rule}
    right = graded(
        lambda x, w, b: F.cross_entropy(F.linear(x, w, b), target, weight=weight, **rule),
        tensors,
        gradient,
    )
    fused = graded(lambda x, w, b: linear_cross_entropy(x, w, target, b, **ours), tensors, gradient)
    chunked = graded(
        lambda x, w, b: chunked_cross_entropy(F.linear(x, w, b), target, **ours), tensors, gradient
    )
    limit = 1e-12 if dtype is torch.float64 else 2e-5
    torch.testing.assert_close(fused, right, rtol=limit, atol=limit)
    torch.testing.assert_close(chunked, right, rtol=limit, atol=limit)


def test_z_loss_is_added() -> None:
    tensors, target = given(torch.float64, True)

    def right(*xwb: Tensor) -> Tensor:
        logits = F.linear(*xwb)
        squares = torch.logsumexp(logits, 1).square()[target != -100]
        return F.cross_entropy(logits, target) + 0.1 * squares.mean()

    one = torch.tensor(1.0)
    ours = graded(
        lambda x, w, b: linear_cross_entropy(x, w, target, b, z_loss=0.1, rows=8), tensors, one
    )
    torch.testing.assert_close(ours, graded(right, tensors, one), rtol=1e-12, atol=1e-12)


def test_images_of_classes() -> None:
    torch.manual_seed(0)
    logits, target = torch.randn(2, 5, 4, 7, dtype=torch.float64), torch.randint(0, 5, (2, 4, 7))
    one = torch.tensor(1.0)
    ours = graded(lambda x: chunked_cross_entropy(x, target, rows=3), [logits], one)
    torch.testing.assert_close(ours, graded(lambda x: F.cross_entropy(x, target), [logits], one))


def test_all_ignored_is_what_pytorch_makes_of_it() -> None:
    tensors, target = given(torch.float64, False)
    target.fill_(-100)
    one = torch.tensor(1.0)
    right = graded(lambda x, w, _: F.cross_entropy(x @ w.t(), target), tensors, one)
    ours = graded(lambda x, w, _: linear_cross_entropy(x, w, target, rows=8), tensors, one)
    torch.testing.assert_close(ours, right, equal_nan=True)
    assert ours[0].isnan()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_types_are_summed_in_float32(dtype: torch.dtype) -> None:
    """The gradient of the weight is as near to the right one as its type allows, over many chunks."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(4096, 8).to(dtype), torch.randn(20, 8).to(dtype)
    target = torch.randint(0, 20, (4096,))
    one = torch.tensor(1.0)
    wide: list[Tensor | None] = [hidden.double(), weight.double()]
    right = graded(lambda x, w: F.cross_entropy(x @ w.t(), target, reduction="sum"), wide, one)
    ours = graded(
        lambda x, w: linear_cross_entropy(x, w, target, reduction="sum", rows=16),
        [hidden, weight],
        one,
    )
    assert ours[0].dtype is torch.float32
    assert ours[2].dtype is dtype
    limit = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(
        ours[2].double(), right[2], rtol=limit, atol=limit * right[2].abs().max()
    )


def test_small_gradients_survive_float16() -> None:
    """A scaler multiplies the loss so that gradients do not vanish: they must not have vanished before."""
    torch.manual_seed(0)
    hidden = torch.randn(64, 8).half().requires_grad_()
    weight = torch.zeros(4000, 8).half().requires_grad_()
    loss = linear_cross_entropy(hidden, weight, torch.zeros(64, dtype=torch.int64), rows=16)
    (loss * 65536).backward()
    assert weight.grad is not None
    assert (weight.grad[1:] != 0).all()


def test_autocast_is_as_of_a_linear_layer() -> None:
    tensors, target = given(torch.float32, True)
    one = torch.tensor(1.0)

    def under(loss: Loss) -> Loss:
        def call(*xwb: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return loss(*xwb)

        return call

    right = graded(under(lambda x, w, b: F.cross_entropy(F.linear(x, w, b), target)), tensors, one)
    ours = graded(under(lambda x, w, b: linear_cross_entropy(x, w, target, b)), tensors, one)
    assert [x.dtype for x in ours] == [x.dtype for x in right]
    torch.testing.assert_close(ours, right, rtol=0.05, atol=0.005)


@pytest.mark.parametrize(
    "tests",
    [
        ("test_schema", "test_faketensor"),
        pytest.param(("test_aot_dispatch_dynamic",), marks=pytest.mark.slow),
    ],
)
def test_torch_knows_the_operators(tests: tuple[str, ...]) -> None:
    (hidden, weight, _), target = given(torch.float32, False)
    assert hidden is not None
    assert weight is not None
    target = target.clamp(min=0)
    ops: Any = torch.ops.torchtrim
    rule = ("mean", -100, 0.1, 0.0, 8)
    logits = (hidden @ weight.t()).t().unsqueeze(0).requires_grad_()
    own = [hidden.requires_grad_(), weight.requires_grad_()]
    check: Any = torch.library.opcheck
    check(ops.linear_cross_entropy, (*own, None, target, None, *rule), test_utils=tests)
    check(ops.chunked_cross_entropy, (logits, target, None, *rule), test_utils=tests)


def test_the_retained_graph_has_its_gradients_again() -> None:
    tensors, target = given(torch.float64, False)
    hidden, weight = (x.requires_grad_() for x in tensors if x is not None)
    loss = linear_cross_entropy(hidden, weight, target, rows=8)
    first = torch.autograd.grad(loss * 3, (hidden, weight), retain_graph=True)
    again = torch.autograd.grad(loss, (hidden, weight))
    torch.testing.assert_close([3 * x for x in again], list(first))


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_second_derivative_is_refused(reduction: str) -> None:
    hidden, weight = (torch.randn(6, 4, requires_grad=True) for _ in range(2))
    target = torch.arange(6)
    for loss in (
        linear_cross_entropy(hidden, weight, target, reduction=reduction),
        chunked_cross_entropy(hidden @ weight.t(), target, reduction=reduction),
    ):
        with pytest.raises(ApplyFailed, match="cannot be differentiated twice"):
            torch.autograd.grad(loss.sum(), hidden, create_graph=True)
