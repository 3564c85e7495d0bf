"""The operator equals the reference on every path, makes nothing large and repeats itself."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from attention import reference
from attention.cases import Case
from torchtrim.attention import Buckets, ops, relative_attention
from torchtrim.attention.core import kept
from torchtrim.errors import UsageError

PATHS = ["pure"] + (["compiled"] if find_spec("numba") else [])
METHODS = ("product", "cross", "euclidean", "quantization")


def grid(height: int = 5, width: int = 7, skip: int = 1, method: str = "product") -> Buckets:
    return Buckets.of_ratio(method, height, width, skip=skip)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", [(8, 8, 0), (5, 12, 1), (1, 1, 0), (1, 9, 3), (6, 1, 2)])
def test_it_equals_the_reference(path: str, method: str, shape: tuple[int, int, int]) -> None:
    Case(grid(*shape, method)).check(path)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("on", ["", "q", "k", "v", "b", "qk", "kv", "qkvb"])
def test_any_of_the_tables(path: str, on: str) -> None:
    Case(grid(), on, shared=False).check(path)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("skip", range(11))
def test_every_number_of_skip_tokens(path: str, skip: int) -> None:
    Case(grid(3, 4, skip)).check(path)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("shape", [(16, 16, 0), (14, 14, 1), (19, 17, 0)])
def test_larger_images(path: str, shape: tuple[int, int, int]) -> None:
    Case(grid(*shape), heads=3, dim=16).check(path)


@pytest.mark.parametrize("path", PATHS)
def test_masks_of_every_kind(path: str) -> None:
    length = grid().tokens
    allowed = torch.rand(2, 1, 1, length) > 0.3
    added = torch.randn(1, 2, length, length)
    for mask in (allowed, allowed.expand(2, 2, length, length), added, added[0, 0]):
        Case(grid(), mask=mask).check(path)


@pytest.mark.parametrize("path", PATHS)
def test_a_query_that_sees_nothing_gives_zeros(path: str) -> None:
    allowed = torch.rand(1, 1, grid().tokens, grid().tokens) > 0.3
    allowed[..., 4, :] = False
    case = Case(grid(), mask=allowed)
    case.check(path)
    assert case.found(path)[:, :, 4].abs().max() == 0


@pytest.mark.parametrize("path", PATHS)
def test_dropout_is_that_of_its_seed(path: str) -> None:
    case = Case(grid(), heads=3)
    torch.manual_seed(7)
    seed = torch.randint(0, 2**62, (1,), dtype=torch.int64)
    torch.manual_seed(7)
    found = case.found(path, dropout_p=0.3)
    length = case.buckets.tokens
    rows = torch.arange(2 * 3 * length).view(2, 3, length)
    keep = kept(seed, rows, length, 0.3, torch.float64)
    assert 0.2 < (keep == 0).double().mean() < 0.4
    expected = case.expected(keep=keep)
    assert (found - expected).abs().max() <= 4e-6
    for one, other in zip(case.gradients(found), case.gradients(expected), strict=True):
        assert (one - other).norm() / other.norm() <= 2e-5


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_errs_no_more_than_the_plain_form(path: str, dtype: torch.dtype) -> None:
    case = Case(grid(8, 8, 0), dtype=dtype, dim=16)
    exact = case.expected()
    plain = (case.expected(dtype) - exact).abs().mean()
    assert case.found(path).dtype == dtype
    assert (case.found(path) - exact).abs().mean() <= 1.5 * plain
    wanted, naive = case.gradients(exact), case.gradients(case.expected(dtype))
    for one, other, truth in zip(case.gradients(case.found(path)), naive, wanted, strict=True):
        allowed = 1.5 * (other.double() - truth.double()).norm() + 1e-3 * truth.double().norm()
        assert (one.double() - truth.double()).norm() <= allowed


@pytest.mark.slow
def test_gradients_in_double_precision() -> None:
    for method, skip in (("product", 1), ("cross", 0), ("euclidean", 2)):
        case = Case(grid(2, 2, skip, method), "qkvb", 1, 1, 2, dtype=torch.float64)
        assert torch.autograd.gradcheck(lambda *_, case=case: case.found(), case.leaves)


@pytest.mark.parametrize("path", PATHS)
def test_gradients_repeat_bit_for_bit(path: str) -> None:
    case = Case(grid(14, 14, 1), heads=3, dim=16)
    first, second = (case.gradients(case.found(path)) for _ in range(2))
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize("path", PATHS)
def test_not_a_number_stays_visible(path: str) -> None:
    case = Case(grid(), "k")
    with torch.no_grad():
        case.qkv[0][0, 0, 3] = float("nan")
    assert case.found(path)[0, 0, 3].isnan().all()
    assert not case.found(path)[0, 1].isnan().any()


class Largest(TorchDispatchMode):
    """The elements of the largest tensor that was made, inside of the operators too."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0
        self.inside = {
            torch.ops.torchtrim.relative_attention.default: ops._forward,
            torch.ops.torchtrim.relative_attention_backward.default: ops._backward,
        }

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self.inside:
            with self:
                return self.inside[func](*args)
        result = func(*args, **(kwargs or {}))
        for one in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(one, Tensor) and one._base is None:
                self.elements = max(self.elements, one.numel())
        return result


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("size", [14, 16, 32])
def test_nothing_large_is_made(path: str, size: int) -> None:
    case = Case(grid(size, size, 0), heads=2, batch=1 if size == 32 else 2)
    with Largest() as largest:
        case.gradients(case.found(path))
    assert 0 < largest.elements < case.batch * case.heads * size**4 / 2


@pytest.mark.parametrize("size", [8, 14, 32])
def test_little_is_kept_for_the_backward(size: int) -> None:
    case = Case(grid(size, size, 0), heads=6, dim=64)
    with saved() as ours:
        case.found()
    with saved() as plain:
        torch.nn.functional.scaled_dot_product_attention(*case.qkv)
    assert sum(ours.values()) <= 1.5 * sum(plain.values())


@contextmanager
def saved() -> Iterator[dict[int, int]]:
    """Bytes by storage that autograd keeps."""
    bytes_of: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        bytes_of[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        yield bytes_of


@pytest.mark.parametrize("path", PATHS)
def test_lookups_and_values_of_each_sample(path: str) -> None:
    case = Case(grid(), "")
    length, number = case.buckets.tokens, case.buckets.number
    shapes = {
        "q_table": (2, 1, length, number),
        "k_table": (2, 2, length, number),
        "v_table": (2, 1, number, 8),
    }
    case.tables = {name: case.leaf(*shape) for name, shape in shapes.items()}
    case.check(path)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("size", [5, 12])
def test_watched_and_not_it_is_the_same(path: str, size: int) -> None:
    """With a mode around it the dispatcher's operator runs, without one the same functions."""
    case = Case(grid(size, size, 1))
    with Largest():
        seen = case.found(path)
        gradients = case.gradients(seen)
    assert torch.equal(case.found(path), seen)
    assert all(map(torch.equal, case.gradients(case.found(path)), gradients))
    found = case.found(path)
    with Largest():
        assert all(map(torch.equal, case.gradients(found), gradients))


def test_it_runs_in_threads_at_once() -> None:
    case = Case(grid(6, 6, 1))
    expected = case.found()
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(lambda _: case.found(), range(24)):
            assert torch.equal(found, expected)


def test_a_second_derivative_is_refused() -> None:
    """Also where the gradient that comes needs none itself, and would lack its part of a sum in silence."""
    case = Case(grid(3, 3, 0))
    with pytest.raises(RuntimeError, match="differentiated twice"):
        torch.autograd.grad(case.found().sum(), case.leaves, create_graph=True)
    with Largest(), pytest.raises(RuntimeError, match="differentiated twice"):
        torch.autograd.grad(case.found().sum(), case.leaves, create_graph=True)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_torch_checks_the_operator() -> None:
    case = Case(grid(2, 3), "qkvb", dim=4, dtype=torch.float64)
    tables = [case.tables.get(name) for name in ("q_table", "k_table", "v_table", "bias")]
    arguments = (*case.qkv, *tables, None, None, case.buckets.key, 0.0, 0.5, "pure")
    torch.library.opcheck(torch.ops.torchtrim.relative_attention.default, arguments)


@pytest.mark.parametrize("method", ["product", "cross"])
def test_it_compiles_into_one_graph(method: str) -> None:
    case = Case(grid(method=method))
    compiled = torch.compile(case.found, fullgraph=True, backend="aot_eager")
    assert torch.allclose(compiled(), case.found(), atol=1e-6)
    for one, other in zip(case.gradients(compiled()), case.gradients(case.found()), strict=True):
        assert torch.allclose(one, other, atol=1e-4)


def test_it_exports() -> None:
    case = Case(grid(), "qkv")

    class Model(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
            return relative_attention(q, k, v, k_table=table, buckets=case.buckets)

    arguments = (*(x.detach() for x in case.qkv), case.tables["k_table"].detach())
    exported = torch.export.export(Model(), arguments)
    assert torch.equal(exported.module()(*arguments), Model()(*arguments))


def test_autocast_lowers_queries_keys_and_values() -> None:
    case = Case(grid(), dim=16)
    with torch.autocast("cpu", torch.bfloat16):
        found = case.found()
    assert found.dtype == torch.bfloat16
    assert (found - case.expected()).abs().max() < 0.1
    assert [one.dtype for one in case.gradients(found)] == [torch.float32] * 6


def test_the_skip_may_be_given_apart() -> None:
    case = Case(grid(3, 3, 2))
    found = case.found()
    case.buckets = grid(3, 3, 0)
    assert torch.equal(case.found(skip=2), found)


def test_an_empty_batch_and_no_gradient() -> None:
    for path in PATHS:
        case = Case(grid(), batch=0)
        assert case.found(path).shape == (0, 2, 36, 8)
        assert all(one.abs().sum() == 0 for one in case.gradients(case.found(path)))


def test_the_reference_is_the_published_way() -> None:
    case = Case(grid(4, 5))
    arguments = (*case.qkv, case.buckets.ids(), *case.tables.values())
    assert torch.allclose(case.expected(torch.float32), reference.original(*arguments), atol=1e-5)
    assert torch.allclose(case.found(), reference.gathered(*arguments), atol=1e-5)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"q": torch.zeros(2, 3)}, "must be \\(batch, heads, tokens, head_dim\\)"),
        ({"k": torch.zeros(2, 2, 7, 8)}, "k must have the shape of q"),
        ({"buckets": grid(4, 4)}, "the buckets have 17"),
        ({"buckets": "product"}, "must be Buckets"),
        ({"v": torch.zeros(2, 2, 36, 8, dtype=torch.int32)}, "must all be one of"),
        ({"k_table": torch.zeros(1, 8, 49)}, "k_table has the shape"),
        ({"k_table": torch.zeros(1, 2, 36, 51)}, "with one per sample"),
        ({"v_table": torch.zeros(8, 50)}, "v_table has the shape"),
        ({"bias": torch.zeros(2, 36, 36)}, "one number per head and bucket"),
        ({"k_table": (torch.zeros(1, 8, 8),) * 2}, "Only cross"),
        ({"mask": torch.zeros(2, 1, 1, 35)}, "a padding mask"),
        ({"mask": torch.zeros(36, requires_grad=True)}, "bias by bucket"),
        ({"dropout_p": 1.0}, "below 1"),
        ({"skip": 2}, "Pass only one"),
        ({"path": "magic"}, "Choose auto"),
        ({"buckets": grid(method="cross"), "k_table": torch.zeros(1, 8, 8)}, "needs pairs"),
        ({"buckets": grid(method="cross"), "k_table": (torch.zeros(1, 8, 9),) * 2}, "has 8 and 8"),
    ],
)
def test_what_does_not_fit_is_explained(change: dict[str, Any], says: str) -> None:
    given: dict[str, Any] = {name: torch.zeros(2, 2, 36, 8) for name in "qkv"}
    given = {**given, "buckets": grid(), **change}
    with pytest.raises(UsageError, match=says):
        relative_attention(given.pop("q"), given.pop("k"), given.pop("v"), **given)
