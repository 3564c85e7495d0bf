"""What scripts do with tensors of a device, each snippet a function of its name that gives tensors.

SNIPPETS["mask"]("cpu"), and under emulation SNIPPETS["mask"]("cuda")
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

Snippet = Callable[[str], Any]
SNIPPETS: dict[str, Snippet] = {}


def snippet(function: Snippet) -> Snippet:
    """Add a function to the battery."""
    SNIPPETS[function.__name__] = function
    return function


@snippet
def factories(d: str) -> Any:
    made = [
        torch.zeros(3, device=d),
        torch.ones(2, 3, device=d),
        torch.arange(5, device=torch.device(d)),
        torch.full((2,), 3.0, device=d),
        torch.eye(3, device=d),
        torch.linspace(0, 1, 5, device=d),
        torch.scalar_tensor(2.0, device=d),
        torch.tril_indices(3, 3, device=d),
        torch.hann_window(4, device=d),
        torch.empty_strided((2, 3), (3, 1), device=d).zero_(),
    ]
    return [*made, made[0].new_ones(3), torch.zeros_like(made[1]), made[1].new_full((2,), 7.0)]


@snippet
def from_data(d: str) -> Any:
    return [
        torch.tensor([[1.0, 2.0], [3.0, 4.0]], device=d),
        torch.as_tensor([1, 2], device=d),
        torch.as_tensor(np.ones(3), dtype=torch.float32, device=d),
        torch.asarray([1.0, 2.0], device=d),
        torch.from_numpy(np.arange(3)).to(d),
        torch.ones(2, device=d).new_tensor([1, 2]),
        torch.tensor(3, device=d),
    ]


@snippet
def random_numbers(d: str) -> Any:
    half = torch.full((4,), 0.5, device=d)
    return [
        torch.rand(3, device=d),
        torch.randn(3, device=d),
        torch.randint(5, (3,), device=d),
        torch.randperm(5, device=d),
        torch.normal(0.0, 1.0, (3,), device=d),
        torch.bernoulli(half),
        torch.multinomial(half, 2),
        torch.poisson(half),
        torch.normal(half, half),
        torch.rand_like(half),
        torch.empty(3, device=d).uniform_().exponential_().log_normal_(),
    ]


@snippet
def generators(d: str) -> Any:
    generator = torch.Generator(device=d).manual_seed(5)
    first = torch.randn(3, device=d, generator=generator)
    state = generator.get_state()
    second = torch.rand(3, device=d, generator=generator)
    generator.set_state(state)
    again = torch.rand(3, device=d, generator=generator)
    assert torch.equal(second, again)
    return [first, second, torch.randperm(6, device=d, generator=generator)]


@snippet
def moves(d: str) -> Any:
    x = torch.randn(3, 4)
    y = x.to(d, non_blocking=True)
    return [
        x.to(device=d),
        x.to(d, torch.float64),
        x.to(torch.device(d), torch.int64, copy=True),
        y.to(x.dtype),
        y.to(torch.float16),
        torch.ones(2).to(y),
        y.type_as(torch.ones(1, dtype=torch.float64, device=d)),
        x.t().to(d, memory_format=torch.contiguous_format),
        y.double().half().long(),
    ]


@snippet
def views(d: str) -> Any:
    x = torch.randn(4, 6, device=d)
    x.view(2, 12)[0] += 1
    x.t().mul_(2)
    x[:, 0].zero_()
    x.unsqueeze_(0)
    return [
        *(x, x.reshape(-1)[::2], x.expand(2, 4, 6), x.as_strided((2, 2), (1, 2))),
        *(x.narrow(1, 0, 2), x.split(2, 1)[0], x.unbind(0)[0], x.movedim(0, 1), x[..., None]),
        x.view(torch.int32),
    ]


@snippet
def indexing(d: str) -> Any:
    x = torch.randn(5, 4, device=d)
    rows = torch.tensor([0, 2], device=d)
    y = x.clone()
    y[rows] = 1.0
    y[:, [1, 3]] = 2.0
    y[0, 0] = torch.tensor(5.0)
    return [
        *(x[rows], x[[0, 2]], x[torch.tensor([1])], x[0, rows], x[:, None, 1:], y),
        *(x.index_select(0, rows), x.gather(1, x.argsort(1)), x.take(rows)),
        *(x.scatter(1, x.argsort(1), 1.0), x.index_add(0, rows, x[rows])),
    ]


@snippet
def masks(d: str) -> Any:
    x = torch.randn(5, 5, device=d)
    mask = x > 0
    results = [x[mask], x.masked_select(mask), torch.where(mask, x, 0.0), *torch.where(mask)]
    for value in (0.0, torch.ones((), device=d), x[mask] * 2):
        y = x.clone()
        y[mask] = value
        results.append(y)
    return results


@snippet
def gradients_of_masks(d: str) -> Any:
    x = torch.randn(5, 5, device=d, requires_grad=True)
    y = x * 2
    y[x > 0] = (x[x > 0] * 3).exp()
    y.sum().backward()
    return [x.grad]


@snippet
def sorting(d: str) -> Any:
    x = torch.randn(5, 3, device=d)
    return [
        *(*x.topk(2), *x.sort(), x.argmax(1), *x.max(1), *x.median(0), x.quantile(0.5)),
        *(*x.kthvalue(2), x.flip(0), x.roll(1), x.cumsum(0), x.diff(), x.unfold(0, 2, 1)),
        *(torch.searchsorted(x[0].sort()[0], x), torch.histc(x), x.nonzero(), *x.mode(0)),
        *x.unique(return_inverse=True, return_counts=True),
        torch.bincount(torch.tensor([1, 2, 2], device=d), minlength=5),
    ]


@snippet
def repeats(d: str) -> Any:
    t = torch.tensor([1, 2, 0], device=d)
    return [
        *(torch.repeat_interleave(t, 2), torch.repeat_interleave(t, t), t.repeat(2)),
        *(torch.combinations(t), torch.cartesian_prod(t, t), torch.isin(t, t[:1])),
    ]


@snippet
def one_hot(d: str) -> Any:
    t = torch.tensor([[1, 2], [0, 3]], device=d)
    return [F.one_hot(t, 5), F.one_hot(t), F.one_hot(t[:, :0], 3)]


@snippet
def linear_algebra(d: str) -> Any:
    a = torch.tensor([[2.0, 1.0], [1.0, 3.0]], dtype=torch.float64, device=d)
    return [
        *(a @ a, torch.einsum("ij,jk->ik", a, a), torch.linalg.inv(a), torch.linalg.cholesky(a)),
        *(*torch.linalg.eigh(a), *torch.linalg.qr(a), torch.linalg.det(a), torch.cdist(a, a)),
        *(torch.linalg.solve(a, a[0]), torch.linalg.norm(a), torch.block_diag(a, a)),
    ]


@snippet
def complex_numbers(d: str) -> Any:
    x = torch.randn(8, dtype=torch.complex64, device=d, requires_grad=True)
    f = torch.fft.fft(x)
    f.abs().sum().backward()
    real = torch.randn(8, device=d)
    return [f, x.grad, torch.fft.irfft(torch.fft.rfft(real)), torch.view_as_real(x), x.conj()]


@snippet
def sparse(d: str) -> Any:
    indices = torch.tensor([[0, 1, 1], [2, 0, 2]], device=d)
    values = torch.tensor([3.0, 4.0, 5.0], device=d)
    made = torch.sparse_coo_tensor(indices, values, (2, 3))
    other = torch.sparse_coo_tensor([[0, 1], [1, 0]], [1.0, 2.0], (2, 2), device=d)
    assert made.device.type == other.device.type == d
    host = torch.sparse_coo_tensor([[0, 1], [1, 0]], [1.0, 2.0], (2, 2))
    product = torch.sparse.mm(made, torch.ones(3, 2, device=d))
    return [made.to_dense(), made.coalesce().values(), other.to_dense(), product, host.to(d)]


@snippet
def pieces(d: str) -> Any:
    x = torch.randn(3, 4, device=d)
    first, second, third = x
    return [
        *(first, second, third, *x.unbind(1), *x.chunk(2), torch.cat([x, x]), torch.stack([x, x])),
        *(pad_sequence([first, second[:2]]), torch.meshgrid(first, second, indexing="ij")[0]),
    ]


@snippet
def reading(d: str) -> Any:
    x = torch.arange(1.0, 5.0, device=d)
    numbers = [x.sum().item(), float(x[0]), *x.tolist(), len(x), max(x).item(), *map(float, x)]
    flags = [bool(x[0] > 0), (x > 2).any().item(), 3 in x]
    rows = list(range(int(x[2]))) + [1] * int(x[1])
    text = [f"{x[1]:.3f}", "%.2f" % x[0]]  # noqa: UP031
    assert text == ["2.000", "1.00"]
    return [torch.tensor(numbers), torch.tensor(flags), torch.tensor(rows), x.cpu()]


@snippet
def to_numpy(d: str) -> Any:
    x = torch.randn(3, device=d, requires_grad=True)
    return [torch.from_numpy(x.detach().cpu().numpy()), torch.tensor(x.tolist())]


@snippet
def numbers_of_the_host(d: str) -> Any:
    x, two = torch.ones(3, device=d), torch.tensor(2.0)
    return [
        *(x * two, two * x, x / two, x**two, torch.maximum(x, two), two - x, x > two),
        *(torch.where(x > 0, x, two), x.masked_fill(x > 0, two), torch.lerp(x, x, two)),
        *(torch.full((2,), two.item(), device=d), x.clone().fill_(two), x.clamp(max=two)),
    ]


@snippet
def distributions(d: str) -> Any:
    zero, one = torch.zeros(3, device=d), torch.ones(3, device=d)
    kinds = torch.distributions
    results = []
    for kind in (
        kinds.Normal(zero, one),
        kinds.Categorical(logits=zero),
        kinds.Bernoulli(probs=one / 2),
        kinds.Beta(one, one),
        kinds.Dirichlet(one),
        kinds.MultivariateNormal(zero, torch.eye(3, device=d)),
        kinds.Independent(kinds.Laplace(zero, one), 1),
        kinds.OneHotCategorical(logits=zero),
    ):
        sample = kind.sample()
        results += [sample, kind.log_prob(sample)]
    return results


@snippet
def gradients_of_gradients(d: str) -> Any:
    x = torch.randn(3, device=d, requires_grad=True)
    (first,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
    first.sum().backward()
    return [first, x.grad, torch.autograd.functional.jacobian(torch.sin, x[:2])]


@snippet
def results_of_ones_own(d: str) -> Any:
    sink = torch.empty(3, device=d)
    grown = torch.empty(0, device=d)
    torch.add(torch.ones(3, device=d), 1, out=sink)
    grown.resize_(3).copy_(sink)
    shared = torch.empty(0, device=d).set_(sink.untyped_storage(), 1, (2,))
    return [sink, grown, shared, torch.cat([sink, grown], out=torch.empty(6, device=d))]
