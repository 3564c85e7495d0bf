"""Triton's kernels in its interpreter against the reference: run with TRITON_INTERPRET=1."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from attention.cases import Case
from torchtrim.attention import Buckets, triton_path
from torchtrim.attention.dropout import kept


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
    """Half precision errs little."""
    case = Case(Buckets.of_ratio("product", 1, 3), batch=1, heads=1, dtype=torch.float16)
    found = case.found("triton")
    assert found.dtype == torch.float16
    assert (found - case.expected()).abs().max() < 1e-2
    for one, other in zip(case.gradients(found), case.gradients(case.expected()), strict=True):
        assert (one.double() - other.double()).norm() < 1e-2 * other.double().norm()


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
