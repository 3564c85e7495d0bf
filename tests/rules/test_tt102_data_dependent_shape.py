import pytest

from profiles import Step, use
from torchtrim.records.finding import Finding
from torchtrim.rules.tt102_data_dependent_shape import check


def found(name: str, *dtypes: str, device: str = "cuda:0") -> list[Finding]:
    step = Step(device)
    step.op(name, *(use(step.alive("input", 16), dtype) for dtype in dtypes), line=5)
    return list(check(step.profile()))


@pytest.mark.parametrize(
    "name",
    [
        "aten::nonzero",
        "aten::_unique2",
        "aten::unique_dim",
        "aten::unique_consecutive",
        "aten::bincount",
        "aten::repeat_interleave.Tensor",
    ],
)
def test_operators_that_count(name: str) -> None:
    (finding,) = found(name, "int64")
    assert (finding.code, finding.line, finding.count_per_step) == ("TT102", 5, 1)


@pytest.mark.parametrize("device", ["cuda:0", "emulated"])
@pytest.mark.parametrize("mask", ["bool", "uint8"])
def test_indexing_with_a_mask(mask: str, device: str) -> None:
    assert found("aten::index.Tensor", "float32", mask, device=device)


def test_a_mask_among_other_indices() -> None:
    assert found("aten::index.Tensor", "float32", "int64", "bool")


@pytest.mark.parametrize("self_type", ["float32", "bool", "uint8"])
def test_indexing_with_integers_knows_its_shape(self_type: str) -> None:
    assert not found("aten::index.Tensor", self_type, "int64")


@pytest.mark.parametrize("name", ["aten::index_put", "aten::index_put_", "aten::_index_put_impl_"])
def test_writing_through_a_mask(name: str) -> None:
    assert found(name, "float32", "bool", "float32")


def test_writing_boolean_values_at_integers_knows_its_shape() -> None:
    assert not found("aten::index_put_", "bool", "int64", "bool")


@pytest.mark.parametrize(
    ("shape", "where", "masks", "count"),
    [
        ((), "cpu", 1, 0),
        ((1,), "cpu", 1, 0),
        ((), "cuda:0", 1, 1),
        ((4,), "cpu", 1, 1),
        ((), "cpu", 2, 1),
    ],
)
def test_a_number_is_filled_in_without_counting(
    shape: tuple[int, ...], where: str, masks: int, count: int
) -> None:
    step = Step("cuda:0")
    x = step.alive("input", 16)
    mask = use(step.alive("input", 4), "bool")
    value = use(step.alive("temporary", 4, device=where), shape=shape)
    step.op("aten::index_put_", x, *[mask] * masks, value)
    assert len(list(check(step.profile()))) == count


@pytest.mark.parametrize(
    "name",
    ["aten::nonzero_static", "aten::masked_fill.Scalar", "aten::where.self", "aten::sort",
     "aten::count_nonzero", "aten::masked_scatter", "aten::repeat_interleave.self_int"],
)  # fmt: skip
def test_operators_that_keep_their_shape(name: str) -> None:
    assert not found(name, "float32", "bool")


@pytest.mark.parametrize("name", ["aten::nonzero", "aten::masked_select", "aten::index.Tensor"])
def test_a_step_on_the_cpu_waits_for_nothing(name: str) -> None:
    assert not found(name, "float32", "bool", device="cpu")


def test_a_tensor_in_the_hosts_memory_waits_for_nothing() -> None:
    step = Step("cuda:0")
    labels = step.alive("input", 16, device="cpu")
    step.op("aten::nonzero", labels)
    step.op("aten::index.Tensor", labels, use(labels, "bool"))
    assert not list(check(step.profile()))


def test_no_inputs_is_no_wait() -> None:
    assert not found("aten::nonzero")


def test_backward_counts_on_the_line_of_its_forward() -> None:
    step = Step("cuda:0")
    x, mask = step.alive("input", 16), use(step.alive("input", 4), "bool")
    picked = step.op("aten::index.Tensor", x, mask, makes=8, line=31, seconds=0.002)
    step.op("aten::sum", picked, line=32)
    step.op(
        "aten::index_put", x, mask, picked, phase="backward", forward=picked.index,
        line=99, seconds=0.003,
    )  # fmt: skip
    (finding,) = check(step.profile())
    assert (finding.line, finding.count_per_step) == (31, 2)
    assert finding.price_ms == pytest.approx(5)
    assert "aten::index, aten::index_put in backward" in finding.message


def test_the_advice_fits_the_operator() -> None:
    reasons = {
        name: finding.cure.reason
        for name in ("aten::_unique2", "aten::repeat_interleave.Tensor", "aten::masked_select")
        for finding in found(name, "float32", "bool")
        if finding.cure
    }
    assert "sort" in reasons["aten::_unique2"]
    assert "output_size=" in reasons["aten::repeat_interleave.Tensor"]
    assert "torch.where" in reasons["aten::masked_select"]
