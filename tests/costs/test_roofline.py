"""Work and bytes of operators, and the time that a named device takes at least."""

import pytest

from profiles import Step, use
from torchtrim.costs.devices import DEVICES
from torchtrim.costs.roofline import HOST_SECONDS, bytes_of, estimate, flops
from torchtrim.records.profile import Operator, TensorUse

Shape = tuple[int, ...]


def operator(name: str, inputs: list[Shape], outputs: list[Shape]) -> Operator:
    def uses(shapes: list[Shape]) -> tuple[TensorUse, ...]:
        return tuple(TensorUse(i, "float32", shape, ()) for i, shape in enumerate(shapes))

    return Operator(
        name, "forward", -1, -1, -1, -1, -1, uses(inputs), uses(outputs), (), 0.0, 0.0, 0
    )


@pytest.mark.parametrize(
    ("name", "inputs", "outputs", "count"),
    [
        ("aten::mm.default", [(8, 16), (16, 32)], [(8, 32)], 2 * 8 * 16 * 32),
        ("aten::addmm.default", [(32,), (8, 16), (16, 32)], [(8, 32)], 2 * 8 * 16 * 32),
        ("aten::bmm.default", [(4, 8, 16), (4, 16, 32)], [(4, 8, 32)], 2 * 4 * 8 * 16 * 32),
        ("aten::baddbmm.default", [(4, 8, 32), (4, 8, 16), (4, 16, 32)], [(4, 8, 32)], 32768),
        ("aten::linear.default", [(2, 8, 16), (32, 16), (32,)], [(2, 8, 32)], 2 * 2 * 8 * 16 * 32),
        (
            "aten::convolution.default",
            [(2, 3, 8, 8), (16, 3, 3, 3), (16,)],
            [(2, 16, 8, 8)],
            2 * 2 * 16 * 64 * 27,
        ),
        (
            "aten::convolution_backward.default",
            [(2, 16, 8, 8), (2, 3, 8, 8), (16, 3, 3, 3)],
            [(2, 3, 8, 8), (16, 3, 3, 3), (16,)],
            2 * 2 * 2 * 16 * 64 * 27,
        ),
        (
            "aten::convolution_backward.default",
            [(2, 16, 8, 8), (2, 3, 8, 8), (16, 3, 3, 3)],
            [(16, 3, 3, 3)],
            2 * 2 * 16 * 64 * 27,
        ),
        (
            "aten::_scaled_dot_product_flash_attention.default",
            [(2, 4, 10, 8), (2, 4, 20, 8), (2, 4, 20, 8)],
            [(2, 4, 10, 8)],
            2 * 2 * 4 * 10 * 20 * 16,
        ),
        (
            "aten::_scaled_dot_product_flash_attention_backward.default",
            [(2, 4, 10, 8), (2, 4, 10, 8), (2, 4, 20, 8), (2, 4, 20, 8)],
            [(2, 4, 10, 8)],
            2.5 * 2 * 2 * 4 * 10 * 20 * 16,
        ),
        ("aten::relu.default", [(5, 7)], [(5, 7)], 35),
        ("aten::mm.default", [], [], 0),
        ("aten::convolution.default", [(2, 3, 8, 8)], [], 384),
        ("aten::_scaled_dot_product_flash_attention.default", [(1, 1, 4, 4)], [], 16),
    ],
)
def test_flops(name: str, inputs: list[Shape], outputs: list[Shape], count: float) -> None:
    assert flops(operator(name, inputs, outputs)) == count


@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        *(("float32", 4), ("bfloat16", 2), ("float64", 8), ("int64", 8), ("bool", 1)),
        *(("uint8", 1), ("complex64", 8), ("complex128", 16), ("float8_e4m3fn", 1)),
    ],
)
def test_bytes(dtype: str, size: int) -> None:
    assert bytes_of(use(0, dtype, (3, 5))) == 15 * size


def test_the_longer_of_arithmetic_and_traffic() -> None:
    step = Step("emulated")
    big = step.alive("parameter", 4, device="cuda:0")
    host = step.alive("input", 4, device="cpu")
    n = 4096
    square = use(big, "bfloat16", (n, n))
    step.op("aten::mm", square, square, mutates=(big,))
    step.op("aten::add_", square, mutates=(big,))
    step.op("aten::view", square)
    step.op("aten::add", use(host, "float32", (n, n)))
    step.op("aten::_to_copy", use(host, "float32", (n, n)), square)
    h100 = DEVICES["h100"]
    found = estimate(step.profile(), h100)
    product, addition, view, cpu, copy = found.device_seconds
    assert product == pytest.approx(2 * n**3 / 989e12)
    assert addition == pytest.approx(n * n * 2 / 3350e9)
    assert (view, cpu) == (0, 0)
    assert copy == pytest.approx(n * n * 2 / h100.link)
    assert found.host_seconds[2] == HOST_SECONDS
    assert found.host_seconds[0] == HOST_SECONDS + h100.call
    assert found.source == "modelled"


def test_nothing_that_is_launched_takes_no_time() -> None:
    """Twenty-two small patterns are busy for as long as their kernels and copies are in traces."""
    step = Step("emulated")
    small = use(step.alive("parameter", 4, device="cuda:0"), "float32", (3,))
    host = use(step.alive("input", 4, device="cpu"), "float32", (3,))
    for _ in range(11):
        step.op("aten::add", small, small)
        step.op("aten::_to_copy", host, small)
    for name in ("a100", "h100", "b200", "mi300x"):
        device = DEVICES[name]
        times = estimate(step.profile(), device).device_seconds
        assert set(times[::2]) == {device.floor}
        assert device.floor >= 1e-6
        assert min(times[1::2]) >= 0.9e-6
