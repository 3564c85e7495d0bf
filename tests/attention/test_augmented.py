"""The cross method through torch's own attention is exact."""

import pytest
import torch

from attention.cases import Case
from attention.test_relative import Largest
from torchtrim.attention import Buckets, ops
from torchtrim.attention.relative import augmented_is_better


@pytest.fixture
def only_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    for path in ("compiled", "triton"):
        monkeypatch.setitem(ops._INSTALLED, path, False)


@pytest.mark.usefixtures("only_torch")
@pytest.mark.parametrize("on", ["q", "k", "v", "b", "qkvb"])
@pytest.mark.parametrize("shape", [(4, 6, 0), (5, 3, 2), (1, 1, 1)])
def test_it_equals_the_reference(on: str, shape: tuple[int, int, int]) -> None:
    height, width, skip = shape
    buckets = Buckets.of_ratio("cross", height, width, skip=skip)
    case = Case(buckets, on)
    assert augmented_is_better(case.qkv[0], buckets, 0.0)
    case.check("auto", forward=4e-6)


@pytest.mark.usefixtures("only_torch")
def test_masks_and_nothing_large() -> None:
    buckets = Buckets.of_ratio("cross", 12, 12)
    case = Case(buckets, mask=torch.rand(2, 1, 1, 144) > 0.3)
    with Largest() as largest:
        case.check("auto", forward=4e-6)
    assert largest.elements > 0


def test_dropout_is_left_to_the_operator() -> None:
    buckets = Buckets.of_ratio("cross", 4, 4)
    assert not augmented_is_better(torch.zeros(1, 1, 16, 4), buckets, 0.1)
