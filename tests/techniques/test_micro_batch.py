"""A module that runs in parts of the batch gives the same up to rounding, or is refused with the reason."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from torchtrim.errors import ApplyFailed
from torchtrim.records.plan import Technique
from torchtrim.techniques.micro_batch.technique import TECHNIQUE


def applied(model: nn.Module, parts: int = 4, **options: Any) -> Any:
    plan = Technique(name="micro_batch", where=("Net",), options={"parts": parts, **options})
    return TECHNIQUE.apply({"Net": model}, plan)


Loss = Callable[[nn.Module], torch.Tensor]


def gradients(model: nn.Module, loss: Loss, seed: int = 3) -> tuple[torch.Tensor, ...]:
    """The loss, all gradients and the state of the generator after a step."""
    model.zero_grad()
    torch.manual_seed(seed)
    value = loss(model)
    value.backward()
    grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return value.detach(), *grads, torch.get_rng_state()


def assert_same(model: nn.Module, loss: Loss, parts: int = 4, bound: float = 1e-12) -> None:
    """In parts it gives the same, again and again, and once it is reverted to the bit."""
    model.double()
    before = gradients(model, loss)
    handle = applied(model, parts)
    for _ in range(2):
        after = gradients(model, loss)
        assert len(after) == len(before)
        for one, two in zip(before, after, strict=True):
            assert (one.double() - two.double()).abs().max() <= bound * one.double().abs().max()
    handle.revert()
    assert all(torch.equal(a, b) for a, b in zip(before, gradients(model, loss), strict=True))


class Attention(nn.Module):
    """A block of a transformer, attention by function, dropout in three places."""

    def __init__(self, width: int, dropout: float, causal: bool) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )
        self.drop = nn.Dropout(dropout)
        self.causal = causal

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.shape
        qkv = self.qkv(self.norms[0](x)).view(b, t, 3, 2, c // 2).permute(2, 0, 3, 1, 4)
        rate = self.drop.p if self.training else 0.0
        y = F.scaled_dot_product_attention(*qkv, dropout_p=rate, is_causal=self.causal)
        x = x + self.drop(self.out(y.transpose(1, 2).reshape(b, t, c)))
        return x + self.drop(self.mlp(self.norms[1](x)))


class Gpt(nn.Module):
    """Logits, and their loss where it is given labels; its head is tied."""

    def __init__(self, dropout: float = 0.1, layers: int = 2, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, width)
        self.place = nn.Embedding(12, width)
        self.blocks = nn.Sequential(*(Attention(width, dropout, True) for _ in range(layers)))
        self.head = nn.Linear(width, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(
        self, tokens: torch.Tensor, labels: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        x = self.embed(tokens) + self.place(torch.arange(tokens.shape[1]))
        logits = self.head(self.blocks(x))
        if labels is None:
            return logits, None
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-1)
        return logits, loss


class Vit(nn.Module):
    """Patches, a class token, blocks that are dropped for some samples, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 4, stride=4)
        self.token = nn.Parameter(torch.zeros(1, 1, 16))
        self.blocks = nn.ModuleList(Attention(16, 0.1, False) for _ in range(2))
        self.head = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat((self.token.expand(len(x), -1, -1), x), 1)
        for block in self.blocks:
            kept = x.new_empty(len(x), 1, 1).bernoulli_(0.7)
            x = x + kept * (block(x) - x)
        return self.head(x[:, 0])


def tokens(samples: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(50, (samples, 12), generator=torch.Generator().manual_seed(seed))


def unequal_labels(samples: int) -> torch.Tensor:
    """Most samples have few labels that count, the last none at all."""
    labels = tokens(samples, 1)
    for sample in range(samples):
        labels[sample, 12 - sample :] = -1
        labels[sample, sample + 3 :] = -1
    labels[-1] = -1
    return labels


@pytest.mark.parametrize(("samples", "parts"), [(8, 2), (8, 8), (7, 3), (5, 4)])
def test_a_loss_outside_sees_the_whole_batch(samples: int, parts: int) -> None:
    torch.manual_seed(0)
    data, labels = tokens(samples), unequal_labels(samples)

    def loss(model: nn.Module) -> torch.Tensor:
        return F.cross_entropy(model(data)[0].flatten(0, 1), labels.flatten(), ignore_index=-1)

    assert_same(Gpt(), loss, parts)


@pytest.mark.parametrize(("samples", "parts"), [(8, 2), (8, 8), (7, 3)])
def test_a_loss_inside_is_divided_by_the_labels_that_count(samples: int, parts: int) -> None:
    torch.manual_seed(0)
    data, labels = tokens(samples), unequal_labels(samples)
    model = Gpt()
    assert_same(model, lambda net: net(data, labels)[1], parts)
    with torch.no_grad():
        whole = model(data[:4], labels[:4])[1]
        halves = [model(data[r], labels[r])[1] for r in (slice(0, 2), slice(2, 4))]
    assert abs(float(sum(halves) / 2 - whole)) > 1e-3


def test_attention_that_drops_nothing_draws_nothing() -> None:
    torch.manual_seed(0)
    data = tokens(8)
    assert_same(Gpt(dropout=0.0), lambda net: net(data)[0].square().mean())


def test_a_vision_transformer_with_dropout_and_dropped_blocks() -> None:
    torch.manual_seed(0)
    data = torch.randn(6, 3, 16, 16).double()
    assert_same(Vit(), lambda net: F.cross_entropy(net(data), torch.arange(6) % 5), 3)


def test_contrastive_losses_outside_see_all_samples() -> None:
    torch.manual_seed(0)
    data = torch.randn(8, 6).double()

    def loss(model: nn.Module) -> torch.Tensor:
        one, two = F.normalize(model(data), dim=-1), F.normalize(model(data.flip(1)), dim=-1)
        return F.cross_entropy(one @ two.T, torch.arange(8))

    assert_same(nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4)), loss)


@dataclass
class Pair:
    left: torch.Tensor
    right: torch.Tensor
    scale: float = 2.0


class Named(NamedTuple):
    value: torch.Tensor
    rest: dict[str, Any]


class Siamese(nn.Module):
    """Two inputs in a dataclass, a dict of results, with a number that all share."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 4))
        self.temperature = nn.Parameter(torch.tensor(0.5))

    def forward(self, pair: Pair, *, shift: torch.Tensor) -> Named:
        one, two = self.body(pair.left + shift), self.body(pair.right) * pair.scale
        rest = {"sides": [one, two], "scale": self.temperature.exp(), "none": None}
        return Named((one - two).square().sum(1), rest)


def test_two_inputs_in_a_dataclass_and_results_in_a_dict() -> None:
    torch.manual_seed(0)
    left, right = torch.randn(2, 8, 6).double()
    shift = torch.randn(6).double().requires_grad_()
    grown = left.clone().requires_grad_()

    def loss(model: nn.Module) -> torch.Tensor:
        shift.grad = grown.grad = None
        found = model(Pair(grown, right), shift=shift)
        assert found.rest["none"] is None
        return (found.value * found.rest["scale"]).mean() + found.rest["sides"][1].std()

    model = Siamese().double()
    gradients(model, loss)
    assert shift.grad is not None
    assert grown.grad is not None
    before = shift.grad.clone(), grown.grad.clone()
    assert_same(model, loss, 3)
    applied(model, 3)
    gradients(model, loss)
    assert torch.allclose(before[0], shift.grad, rtol=1e-12)
    assert torch.allclose(before[1], grown.grad, rtol=1e-12)


class Recurrent(nn.Module):
    """An embedding, an LSTM that is given its states, and a head: what truncated backpropagation runs."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 6)
        self.cells = nn.LSTM(6, 8, 2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor, states: Any) -> tuple[torch.Tensor, Any]:
        out, states = self.cells(self.embed(x), states)
        return self.head(out), states


@pytest.mark.parametrize(("samples", "parts"), [(8, 2), (6, 6), (7, 3)])
def test_states_of_recurrent_layers_have_samples_second(samples: int, parts: int) -> None:
    torch.manual_seed(0)
    data = tokens(samples)
    states = [torch.randn(4, samples, 8).double().requires_grad_() for _ in range(2)]

    def loss(model: nn.Module) -> torch.Tensor:
        states[0].grad = states[1].grad = None
        out, (hidden, cells) = model(data, tuple(states))
        return out.square().mean() + hidden.std() + cells.square().sum()

    model = Recurrent().double()
    gradients(model, loss)
    before = [one.grad.clone() for one in states if one.grad is not None]
    assert_same(model, loss, parts)
    applied(model, parts)
    gradients(model, loss)
    after = [one.grad for one in states if one.grad is not None]
    assert len(before) == len(after) == 2
    assert all(torch.allclose(a, b, rtol=1e-12) for a, b in zip(before, after, strict=True))


class Inside(nn.Module):
    """Takes its own loss."""

    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 5)
        self.function = function

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.function(self.fc(x), y)


WEIGHT = torch.tensor([0.2, 1.0, 3.0, 0.5, 2.0]).double()
CLASSES = torch.tensor([0, 1, 2, 2, 4, -100, 3])
INSIDE: dict[str, Callable[..., torch.Tensor]] = {
    "weighted": lambda v, y: F.cross_entropy(v, y, WEIGHT, label_smoothing=0.1),
    "sum": lambda v, y: F.cross_entropy(v, y, reduction="sum"),
    "nll": lambda v, y: nn.NLLLoss(WEIGHT)(v.log_softmax(1), y),
    "two": lambda v, y: F.cross_entropy(v, y) + 0.1 * v.square().mean(),
    "mean and sum": lambda v, y: F.cross_entropy(v, y) + 0.01 * v.square().sum(),
    "elements": lambda v, y: F.mse_loss(v, F.one_hot(y.clamp(min=0), 5).double()),
    "logits": lambda v, y: F.binary_cross_entropy_with_logits(v[:, 0], (y > 2).double()),
    "batchmean": lambda v, y: F.kl_div(
        v.log_softmax(1), F.one_hot(y.clamp(min=0), 5).double(), reduction="batchmean"
    ),
    "probabilities": lambda v, y: F.cross_entropy(v, F.one_hot(y.clamp(min=0), 5).double()),
}


@pytest.mark.parametrize("name", INSIDE)
def test_losses_inside(name: str) -> None:
    torch.manual_seed(0)
    data = torch.randn(7, 6).double()
    assert_same(Inside(INSIDE[name]), lambda net: net(data, CLASSES), 3)


def test_accumulation_and_a_graph_that_is_kept() -> None:
    torch.manual_seed(0)
    data = torch.randn(8, 6).double()

    def loss(model: nn.Module) -> torch.Tensor:
        model(data[:4]).square().sum().backward()
        value: torch.Tensor = model(data).square().mean()
        value.backward(retain_graph=True)
        return value

    assert_same(nn.Sequential(nn.Linear(6, 9), nn.Dropout(0.3), nn.Linear(9, 4)), loss, 3)


def test_autocast_is_the_same_in_backward() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))
    data = torch.randn(8, 16)

    def loss(net: nn.Module) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return net(data).float().square().mean()

    before = gradients(model, loss)
    applied(model, 2)
    seen: list[torch.dtype] = []
    real = model[1].forward
    model[1].forward = lambda x: (seen.append(x.dtype), real(x))[1]
    after = gradients(model, loss)
    assert set(seen) == {torch.bfloat16}
    for one, two in zip(before, after, strict=True):
        assert torch.allclose(one.float(), two.float(), rtol=0.02, atol=1e-3)


class TimesFirst(nn.Module):
    """A transformer of times x samples, which keeps its mask, and flattens both where it is asked to."""

    def __init__(self, flat: bool) -> None:
        super().__init__()
        self.mask: torch.Tensor | None = None
        self.flat = flat
        self.embed = nn.Embedding(50, 8)
        self.drop = nn.Dropout(0.2)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1)
        self.cells = nn.LSTM(8, 8)
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor, states: Any) -> tuple[torch.Tensor, Any]:
        if self.mask is None or len(self.mask) != len(x):
            self.mask = torch.ones(len(x), len(x)).tril().log().to(self.head.weight.dtype)
        x, states = self.cells(self.layer(self.drop(self.embed(x)), self.mask), states)
        x = self.head(x)
        return F.log_softmax(x.view(-1, 5) if self.flat else x, dim=-1), states


@pytest.mark.parametrize(("samples", "parts", "flat"), [(8, 2, True), (7, 3, False), (6, 8, True)])
def test_samples_of_sequences_may_be_second(samples: int, parts: int, flat: bool) -> None:
    """Times mix, so they are no samples; a result may have all samples at each time."""
    torch.manual_seed(0)
    data = tokens(samples).T
    states = [torch.randn(1, samples, 8).double() for _ in range(2)]
    weights = torch.rand(12 * samples, 1).double()

    def loss(model: nn.Module) -> torch.Tensor:
        model.mask = None
        out, (hidden, _) = model(data, tuple(states))
        return (out.reshape(-1, 5) * weights).sum() + hidden.std()

    assert_same(TimesFirst(flat), loss, parts)


class Kept(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.aux = self.fc(x).square().mean()
        return self.fc(x)


class KeptOfWeights(Kept):
    """Leaves a penalty of its weights on itself, the same for all samples."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.penalty = self.fc.weight.square().sum()
        return self.fc(x)


class Counting(nn.Module):
    """Counts samples in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 5)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += len(x)
        return self.fc(x)


class Mixing(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(0)


class Checkpointed(nn.Module):
    """Drops, and runs again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 6))

    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(self.body, x, use_reentrant=False)


class Called(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6)
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self.fc(x))


def hooked() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 6))
    model[0].weight.register_hook(lambda g: g.clamp(-1, 1))
    return model


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "norm": (lambda: nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)), "`Net.1` is a BatchNorm1d"),
    "mixing": (
        lambda: nn.Sequential(nn.Linear(6, 4), Mixing(), nn.Tanh()),
        "`Net.1` mixes samples",
    ),
    "rows": (lambda: Called(lambda x: x @ x.T @ x), "`Net` mixes samples"),
    "pairs": (
        lambda: Called(lambda x: F.cross_entropy(x @ x.T, torch.arange(len(x)))),
        "neither a sum",
    ),
    "ratio": (lambda: Called(lambda x: x.sum() / x.abs().sum()), "neither a sum"),
    "kept": (Kept, "`Net` keeps tensors of its forward in `self.aux`"),
    "penalty": (KeptOfWeights, "a tensor with gradients in `self.penalty`"),
    "buffer": (Counting, "its buffer seen changes"),
    "in place": (lambda: Called(lambda x: x), "in place"),
    "shuffled": (lambda: Called(lambda x: x[torch.randperm(len(x))]), "`Net` mixes samples"),
    "object": (lambda: Called(lambda x: (x, {1, 2})), "returns a set"),
    "number": (
        lambda: Called(lambda x: (x, float(x.detach().sum()))),
        "a number that depends on the samples",
    ),
    "sums": (lambda: Called(lambda x: x.sum(0)), "that sums over samples"),
    "lengths": (
        lambda: Called(lambda x: torch.cat(x.split([3, 5]))),
        "its forward on .* samples fails",
    ),
    "checkpoint": (Checkpointed, "its backward draws random numbers"),
    "hook": (hooked, "has a hook on the gradient of its weight"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_split_is_refused_and_left_as_it_was(name: str) -> None:
    torch.manual_seed(0)
    make, reason = REFUSED[name]
    model, data = make(), torch.randn(8, 6)
    if name == "in place":
        model.function = lambda x: data.mul_(1.0) + x
        model.forward = lambda x: x.mul_(1.0) * model.fc(x)
    state = copy.deepcopy(model.state_dict())
    handle = applied(model, 2)
    with pytest.raises(ApplyFailed, match=reason):
        model(data)
    handle.revert()
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    model(data)


@pytest.mark.parametrize("options", [{"parts": 1}, {"parts": "two"}, {"parts": 2, "rows": 3}])
def test_bad_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ApplyFailed, match="`parts`, 2 or more"):
        applied(nn.Linear(2, 2), **options)


def test_gradients_that_are_asked_for_by_name_are_refused() -> None:
    model = nn.Linear(6, 4)
    applied(model, 2)
    data = torch.randn(4, 6, requires_grad=True)
    for asked in (data, [*model.parameters()]):  # no None for what it hides
        with pytest.raises(ApplyFailed, match=r"torch\.autograd\.grad"):
            torch.autograd.grad(model(data).sum(), asked, allow_unused=True)


def test_without_gradients_it_runs_as_it_is() -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)).eval()
    applied(model, 2)
    with torch.no_grad():
        model(torch.randn(4, 6))
