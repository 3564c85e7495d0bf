"""iRPE's names, configuration and `state_dict` are the published ones."""

import pytest
import torch

from attention.reference import published_ids
from torchtrim.attention import METHOD, build_rpe, get_rpe_config, iRPE, iRPE_Cross
from torchtrim.attention.irpe import get_num_buckets
from torchtrim.errors import UsageError


def test_the_configuration_is_the_published() -> None:
    config = get_rpe_config(skip=1, rpe_on="qk")
    assert config.rpe_v is None
    assert config.rpe_q == config.rpe_k
    one = config.rpe_k
    assert one is not None
    assert (one.alpha, one.beta, one.gamma, one.num_buckets) == (1.9, 3.8, 15.2, 50)
    assert (one.mode, one.method, one.shared_head) == ("contextual", METHOD.PRODUCT, True)
    assert get_num_buckets(METHOD.EUCLIDEAN, 20, 40, 160) == 81


def test_the_layout_is_the_published() -> None:
    def layout(**options: object) -> list[dict[str, tuple[int, ...]]]:
        encodings = build_rpe(get_rpe_config(rpe_on="qkv", **options), 64, 6)
        return [
            {k: tuple(v.shape) for k, v in one.state_dict().items()} for one in encodings if one
        ]

    weight = "lookup_table_weight"
    assert layout(skip=1) == [{weight: (1, 64, 50)}, {weight: (1, 64, 50)}, {weight: (1, 50, 64)}]
    crossed = {f"rp_rows.{weight}": (6, 64, 7), f"rp_cols.{weight}": (6, 64, 7)}
    assert layout(method="cross", shared_head=False)[0] == crossed
    bias = build_rpe(get_rpe_config(mode="bias", shared_head=False), 64, 6)[1]
    assert isinstance(bias, iRPE)
    assert bias.state_dict()["lookup_table_bias"].shape == (6, 49)
    assert bias.lookup_table_bias.abs().sum() == 0


def test_nothing_is_built_from_nothing() -> None:
    assert build_rpe(None, 8, 2) == (None, None, None)


@pytest.mark.parametrize("method", ["product", "euc", "quant"])
def test_called_alone_it_writes_the_encoding_out(method: str) -> None:
    name = {"euc": "euclidean", "quant": "quantization"}.get(method, method)
    ids = published_ids(name, 4, 6, 1, 1.9)
    on_keys, on_values = build_rpe(get_rpe_config(method=method, skip=1, rpe_on="kv"), 8, 2)[1:]
    assert isinstance(on_keys, iRPE)
    assert isinstance(on_values, iRPE)
    for one in (on_keys, on_values):
        torch.nn.init.normal_(one.lookup_table_weight)
    x = torch.randn(3, 2, 25, 8)
    looked_up = x @ on_keys.lookup_table_weight
    found = on_keys(x, 4, 6)
    assert torch.equal(found, looked_up.gather(-1, ids.expand(3, 2, 25, 25)))
    weights = torch.rand(3, 2, 25, 25)
    expected = torch.einsum("bhij,ijd->bhid", weights, on_values.lookup_table_weight[0][ids])
    assert torch.allclose(on_values(weights, 4, 6), expected, atol=1e-5)


def test_cross_is_the_sum_of_rows_and_columns() -> None:
    ids = published_ids("cross", 3, 4, 1, 1.9)
    one = build_rpe(get_rpe_config(method="cross", mode="bias", skip=1), 8, 2)[1]
    assert isinstance(one, iRPE_Cross)
    for half in (one.rp_rows, one.rp_cols):
        torch.nn.init.normal_(half.lookup_table_bias)
    expected = one.rp_rows.lookup_table_bias[:, ids[0]] + one.rp_cols.lookup_table_bias[:, ids[1]]
    assert torch.equal(one(torch.zeros(1, 2, 13, 8), 3, 4), expected[None])


def test_an_initializer_is_called() -> None:
    one = iRPE(4, 1, "contextual", METHOD.PRODUCT, True, 49, torch.nn.init.ones_)
    assert (one.lookup_table_weight == 1).all()
    assert "method=3" in repr(one)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"method": "diagonal"}, "Choose one of euc, quant, cross, product"),
        ({"mode": "sideways"}, "Choose contextual"),
        ({"rpe_on": "kx"}, "letters q, k and v"),
    ],
)
def test_what_does_not_exist_is_refused(options: dict[str, str], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        get_rpe_config(**options)


def test_a_bias_on_values_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="cannot have a bias"):
        build_rpe(get_rpe_config(mode="bias", rpe_on="v"), 8, 2)
    with pytest.raises(UsageError, match="Create it with build_rpe"):
        iRPE(8)
    nothing = build_rpe(get_rpe_config(mode=None), 8, 2)[1]
    assert nothing is not None
    with pytest.raises(UsageError, match="encodes nothing"):
        nothing(torch.zeros(1, 1, 4, 8))
