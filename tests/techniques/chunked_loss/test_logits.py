"""What stands for logits does as logits do, whatever is done to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from torchtrim.errors import ApplyFailed
from torchtrim.techniques.chunked_loss.found import rows_for
from torchtrim.techniques.chunked_loss.logits import Logits, head_of, kept

BATCH, LENGTH, WIDTH, CLASSES = 3, 7, 8, 11
Use = Callable[[Tensor, Tensor], Tensor]


def flat(logits: Tensor, **rule: Any) -> Callable[[Tensor], Tensor]:
    """The cross entropy of all tokens."""
    return lambda target: F.cross_entropy(logits.view(-1, logits.size(-1)), target.view(-1), **rule)


def written(logits: Tensor, target: Tensor) -> Tensor:
    """Some classes are barred."""
    logits[..., 9:] = -5.0
    return F.cross_entropy(logits.view(-1, CLASSES), target.view(-1))


CHUNKED: dict[str, Use] = {
    "flat": lambda x, y: flat(x)(y),
    "shift": lambda x, y: F.cross_entropy(
        x[..., :-1, :].contiguous().view(-1, CLASSES), y[..., 1:].reshape(-1)
    ),
    "transpose": lambda x, y: F.cross_entropy(x.transpose(1, 2), y),
    "permute": lambda x, y: F.cross_entropy(x.permute(0, 2, 1), y, reduction="sum"),
    "none": lambda x, y: flat(x, reduction="none")(y).dot(torch.arange(21.0, dtype=torch.float64)),
    "module": lambda x, y: torch.nn.CrossEntropyLoss(label_smoothing=0.1)(
        x.flatten(0, 1), y.flatten()
    ),
    "nll": lambda x, y: F.nll_loss(F.log_softmax(x, -1).view(-1, CLASSES), y.view(-1)),
    "gather": lambda x, y: -x.log_softmax(-1).gather(-1, y.unsqueeze(-1)).square().mean(),
    "gather of rows": lambda x, y: F.log_softmax(x, -1)[:, 1:].gather(2, y[:, 1:, None]).sum(),
    "z": lambda x, y: flat(x)(y) + 0.1 * torch.logsumexp(x, -1).square().mean(),
    "classes": lambda x, y: F.cross_entropy(x[..., :9].reshape(-1, 9), y.view(-1).clamp(max=8)),
    "last": lambda x, y: F.cross_entropy(x[:, -1], y[:, -1]),
    "places": lambda x, y: F.cross_entropy(x[:, [0, 2]].transpose(1, 2), y[:, [0, 2]]),
    "one": lambda x, y: F.cross_entropy(x[0, 0], y[0, 0]),
    "same type": lambda x, y: flat(x.to(x.dtype).to(x.device).float().double())(y),
}
READ: dict[str, Use] = {
    "probabilities": lambda x, y: F.cross_entropy(
        x.view(-1, CLASSES), F.one_hot(y.view(-1), CLASSES).double()
    ),
    "read after": lambda x, y: flat(x)(y) + x.sigmoid().mean(),
    "read before": lambda x, y: x.sigmoid().mean() + flat(x)(y),
    "in place": lambda x, y: flat(x.mul_(2))(y),
    "written": written,
    "mask": lambda x, y: F.cross_entropy(x[y > 3], y[y > 3]),
    "gather of two": lambda x, y: x.log_softmax(-1).gather(-1, torch.stack((y, y), -1)).mean(),
    "gather of logits": lambda x, y: x.gather(-1, y.unsqueeze(-1)).mean(),
    "cap": lambda x, y: flat(torch.tanh(x / 5) * 5)(y),
    "hook": lambda x, y: (x.register_hook(lambda g: 2 * g), flat(x)(y))[1],
}


def given(bias: bool) -> tuple[list[Tensor | None], Tensor]:
    """Hidden states, weight and bias, and classes."""
    torch.manual_seed(0)
    shapes = ((BATCH, LENGTH, WIDTH), (CLASSES, WIDTH), (CLASSES,))
    hidden, weight, own = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
    target = torch.randint(0, CLASSES, (BATCH, LENGTH))
    target[0, 3] = 4
    return [hidden, weight, own if bias else None], target


def graded(make: Callable[..., Tensor], use: Use, bias: bool) -> list[Tensor]:
    """The loss of the logits, and the gradients of what made them."""
    tensors, target = given(bias)
    own = [None if one is None else one.clone().requires_grad_() for one in tensors]
    loss = use(make(*own), target)
    assert type(loss) is Tensor
    loss.backward()  # type: ignore[no-untyped-call]
    return [loss.detach(), *(one.grad for one in own if one is not None and one.grad is not None)]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", [*CHUNKED, *READ])
def test_the_loss_and_all_gradients_are_the_same(name: str, bias: bool) -> None:
    use = {**CHUNKED, **READ}[name]
    right = graded(lambda *xwb: F.linear(*xwb) * 1, use, bias)
    limit = 1e-6 if name == "same type" else 1e-12
    lazy = graded(lambda *xwb: head_of(*xwb, "net", 4), use, bias)
    torch.testing.assert_close(lazy, right, rtol=limit, atol=limit)
    there = graded(lambda *xwb: kept(F.linear(*xwb), -1, "net", 4), use, bias)
    torch.testing.assert_close(there, right, rtol=limit, atol=limit)


@pytest.mark.parametrize("name", CHUNKED)
def test_the_logits_are_not_made(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def made(_: Logits) -> Tensor:
        raise AssertionError("the logits were computed")

    monkeypatch.setattr(Logits, "value", made)
    graded(lambda *xwb: head_of(*xwb, "net", 4), CHUNKED[name], True)


def test_a_gathered_class_that_does_not_exist_is_an_error() -> None:
    tensors, target = given(False)
    hidden, weight, _ = tensors
    assert hidden is not None
    assert weight is not None
    logits = head_of(hidden.requires_grad_(), weight, None, "net", 4)
    with pytest.raises(RuntimeError, match="out of bounds"):
        logits.log_softmax(-1).gather(-1, torch.full_like(target, -100).unsqueeze(-1))


def test_it_is_a_tensor_of_their_shape_and_type() -> None:
    (hidden, weight, _), _ = given(False)
    assert hidden is not None
    assert weight is not None
    logits = head_of(hidden.requires_grad_(), weight, None, "net", 4)
    assert isinstance(logits, Tensor)
    assert (logits.shape, logits.dtype, len(logits)) == (
        (BATCH, LENGTH, CLASSES),
        torch.float64,
        BATCH,
    )
    assert logits.requires_grad
    assert not logits.detach().requires_grad
    torch.testing.assert_close(logits.detach() * 1, (hidden @ weight.t()).detach())
    assert torch.equal(logits.argmax(-1), (hidden @ weight.t()).argmax(-1))
    with torch.no_grad():
        fresh = head_of(hidden, weight, None, "net", 4)
        assert "tensor" in repr(fresh)
        assert fresh.there is None


def test_what_is_read_after_its_weights_changed_is_refused() -> None:
    (hidden, weight, _), target = given(False)
    assert hidden is not None
    assert weight is not None
    logits = head_of(hidden.requires_grad_(), weight, None, "Net.head", 4)
    read = head_of(hidden, weight, None, "Net.head", 4)
    before = (read * 1).detach()
    weight.add_(1)
    for use in (lambda: logits.argmax(-1), lambda: flat(logits)(target), lambda: logits[0] + 1):
        with pytest.raises(ApplyFailed, match=r"`Net.head` are read after its weights"):
            use()
    torch.testing.assert_close((read * 1).detach(), before)


def test_what_is_written_while_others_stand_for_it_is_refused() -> None:
    (hidden, weight, _), _ = given(False)
    assert hidden is not None
    assert weight is not None
    logits = head_of(hidden.requires_grad_(), weight, None, "Net.head", 4)
    view = logits.view(-1, CLASSES)
    with pytest.raises(ApplyFailed, match="in place while other variables"):
        logits.mul_(2)
    del view
    logits.mul_(2)
    torch.testing.assert_close(logits * 1, (hidden @ weight.t()) * 2)


def test_operators_below_python_are_refused() -> None:
    (hidden, weight, _), _ = given(False)
    assert hidden is not None
    assert weight is not None
    logits = head_of(hidden.requires_grad_(), weight, None, "Net.head", 4)
    with (
        pytest.raises(ApplyFailed, match="below Python"),
        torch._C.DisableTorchFunctionSubclass(),
    ):
        logits.exp()


def test_the_number_of_rows_suits() -> None:
    assert rows_for(10, 50) == 10
    assert rows_for(10**6, 50) * 50 <= 2**20
    assert rows_for(10**6, 50_000) == 256
