"""Triton's kernels in its interpreter against the reference: run with TRITON_INTERPRET=1."""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from triton import language as tl
from triton.runtime import interpreter

sys.path.insert(0, str(Path(__file__).parents[1]))
from attention import rounding
from attention.cases import Case
from torchtrim.attention import Buckets, triton_path
from torchtrim.attention.core import kept


def main() -> None:
    """Check everything; an assertion says what is wrong."""
    torch.manual_seed(0)
    small = {"batch": 1, "heads": 1, "dim": 5}
    Case(Buckets.of_ratio("product", 3, 4, skip=1), "qkvb", **small).check("triton")
    Case(Buckets.of_ratio("euclidean", 2, 3), **small).check("triton")
    Case(Buckets.of_ratio("cross", 1, 3, skip=2), **small).check("triton")
    Case(Buckets.of_ratio("product", 1, 1), **small).check("triton")
    Case(Buckets("product", 2, 2, 1, "identity", (), 3), "b", **small).check("triton")
    allowed = torch.rand(2, 1, 1, 5) > 0.3
    Case(Buckets.of_ratio("product", 2, 2, skip=1), "k", 2, 1, 4, mask=allowed).check("triton")
    added = torch.randn(6, 6)
    added[2] = -torch.inf
    Case(Buckets.of_ratio("quantization", 2, 3), "v", 1, 1, 4, mask=added).check("triton")
    repeats()
    parts()
    low_precision()
    dropout()


def repeats() -> None:
    """Gradients repeat themselves bitwise."""
    case = Case(Buckets.of_ratio("product", 1, 3), batch=1, heads=1)
    first, second = (case.gradients(case.found("triton")) for _ in range(2))
    assert all(map(torch.equal, first, second))


def parts() -> None:
    """An image row of several tiles."""
    triton_path._WIDEST = 16
    Case(Buckets.of_ratio("product", 1, 18, skip=1), batch=1, heads=1).check("triton")


def low_precision() -> None:
    """Half precision errs by no more than its own roundings, element by element: see `rounding`.

    A tenth more is for what is of second order, and float32's own rounding.
    """
    with products_of_numbers():
        for dtype in (torch.float16, torch.bfloat16):
            for buckets, on in (
                (Buckets.of_ratio("product", 1, 3), "qkv"),
                (Buckets.of_ratio("product", 2, 2, skip=1), "k"),
                (Buckets.of_ratio("product", 2, 2), "kv"),
            ):
                within(Case(buckets, on, batch=1, heads=1, dtype=dtype), on)
            cross = Case(Buckets.of_ratio("cross", 2, 2), "kvb", batch=1, heads=1, dtype=dtype)
            assert distance(cross.found("triton"), cross.expected()) < 2 * torch.finfo(dtype).eps


def within(case: Case, on: str) -> None:
    """The output and all gradients are within what the roundings explain."""
    found, exact = case.found("triton"), case.expected()
    assert found.dtype == case.dtype
    slope = torch.randn(found.shape, generator=torch.Generator().manual_seed(1)).to(case.dtype)
    may = rounding.bounds(case, slope)
    eps = torch.finfo(case.dtype).eps / 2
    check(found, exact, may.out, (on, "out"))
    got = torch.autograd.grad(found, case.leaves, slope)
    want = torch.autograd.grad(exact, case.leaves, slope.double())
    names = ("q", "k", "v", *case.tables)
    for name, one, other, bound in zip(names, got, want, may.gradients, strict=True):
        check(one, other, bound + eps * other.double().abs(), (on, name))


def check(found: torch.Tensor, exact: torch.Tensor, may: torch.Tensor, what: Any) -> None:
    """No element differs by more than it may."""
    off = (found.detach().double() - exact.detach().double()).abs()
    assert bool((off <= 1.1 * may + 1e-6).all()), (what, float((off / (may + 1e-6)).max()))


def distance(found: torch.Tensor, exact: torch.Tensor) -> float:
    """How far apart they are, relative to what is exact, where that is not nearly zero."""
    exact = exact.detach().double()
    return float((found.detach().double() - exact).norm() / exact.norm().clamp(min=0.5))


@contextlib.contextmanager
def products_of_numbers() -> Iterator[None]:
    """The interpreter's `dot` takes bfloat16 for the integers that its bits are: here for the numbers that
    they stand for, with products and sums in float32, as tensor cores have them."""
    theirs = interpreter.InterpreterBuilder.create_dot

    def create_dot(self: Any, a: Any, b: Any, d: Any, *settings: Any) -> Any:
        if a.dtype.scalar != tl.bfloat16:
            return theirs(self, a, b, d, *settings)
        left, right = ((one.data.astype(np.uint32) << 16).view(np.float32) for one in (a, b))
        product = np.matmul(left, right, dtype=np.float32) + d.data
        return interpreter.TensorHandle(product, d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = create_dot
    try:
        yield
    finally:
        interpreter.InterpreterBuilder.create_dot = theirs


def dropout() -> None:
    """Dropout is that of its seed, as on the other paths."""
    case = Case(Buckets.of_ratio("product", 1, 2, skip=1), batch=1, heads=2)
    torch.manual_seed(7)
    seed = torch.randint(0, 2**62, (1,), dtype=torch.int64)
    torch.manual_seed(7)
    found = case.found("triton", dropout_p=0.4)
    keep = kept(seed, torch.arange(6).view(1, 2, 3), 3, 0.4, torch.float64)
    expected = case.expected(keep=keep)
    assert (found - expected).abs().max() < 4e-6
    for one, other in zip(case.gradients(found), case.gradients(expected), strict=True):
        assert (one - other).norm() < 2e-5 * other.norm()


if __name__ == "__main__":
    main()
