"""Attention on emulated devices: the operator of each capability, what it saves, and the CPU's values.

Each case names the line of PyTorch that decides it: `sdp` is `transformers/cuda/sdp_utils.cpp` at
27a4844d7fb, `sdp2.14` the same file at v2.14.1, `cpp` is `transformers/sdp_utils_cpp.h` at v2.13.0.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel

from torchtrim.capture.recording import record_call
from torchtrim.emulator import emulate
from torchtrim.emulator.attention import _Arguments
from torchtrim.emulator.kernels import CONDITIONS, AttentionCall, Target, attention_kernel
from torchtrim.emulator.runtime import model_named

V100, A100, L4, H100, B200 = (7, 0), (8, 0), (8, 9), (9, 0), (10, 0)
OLD, NEW = (2, 13), (2, 14)
HALF, BRAIN, SINGLE, DOUBLE = torch.float16, torch.bfloat16, torch.float32, torch.float64


class Case(NamedTuple):
    """A call, and the kernel that it has by a line of PyTorch's source."""

    line: str
    kernel: str
    capability: tuple[int, int]
    dtype: torch.dtype
    width: int = 64
    torch: tuple[int, int] = OLD
    keys: int = 16
    heads: int = 4
    mask: str = ""
    dropout: float = 0.0
    causal: bool = False
    grouped: bool = False
    values: int = 0


CASES = (
    Case("sdp 298: flash from 8.0 on", "efficient", V100, HALF),
    Case("sdp 877: no bfloat16 before 8.0", "math", V100, BRAIN),
    Case("sdp 877: float32 anywhere", "efficient", V100, SINGLE),
    Case("sdp 877: never float64", "math", A100, DOUBLE),
    Case("sdp 103: flash comes first", "flash", A100, HALF),
    Case("sdp 103: flash comes first", "flash", A100, BRAIN),
    Case("sdp 702: flash takes no float32", "efficient", A100, SINGLE),
    Case("sdp 91: cuDNN comes first on 9.0", "cudnn", H100, BRAIN),
    Case("sdp 91: cuDNN comes first on 10.0", "cudnn", B200, HALF),
    Case("sdp 702: cuDNN takes no float32", "efficient", H100, SINGLE),
    Case("cpp 260: flash takes no mask", "efficient", A100, BRAIN, mask="bool"),
    Case("cpp 270: cuDNN takes a mask", "cudnn", H100, BRAIN, mask="bool"),
    Case("cpp 270: no mask with gradient", "efficient", H100, BRAIN, mask="learned"),
    Case("sdp 449: causal masks are square", "efficient", A100, BRAIN, keys=24, causal=True),
    Case("sdp 449: causal masks are square", "flash", A100, BRAIN, keys=16, causal=True),
    Case("sdp 486: dropout in sixteenths", "flash", H100, BRAIN, dropout=0.1),
    Case("sdp 486: dropout in sixteenths", "cudnn", H100, BRAIN, dropout=0.125),
    Case("sdp 498: heads of at most 128", "flash", H100, BRAIN, width=256),
    Case("sdp 498: heads of at most 128", "cudnn", H100, BRAIN, width=128),
    Case("sdp 147: heads of at most 256", "efficient", A100, HALF, width=264),
    Case("sdp 147: one head size", "efficient", A100, HALF, width=64, values=32),
    Case("sdp 498: cuDNN takes two head sizes", "cudnn", H100, HALF, width=64, values=32),
    Case("sdp 498: a multiple of 8", "flash", H100, BRAIN, width=36),
    Case("sdp 127: float32 in fours on 8.0", "efficient", A100, SINGLE, width=12),
    Case("sdp 127: float32 in fours on 8.0", "math", A100, SINGLE, width=10),
    Case("sdp 127: float32 in ones on 7.0", "efficient", V100, SINGLE, width=10),
    Case("sdp 127: float16 in eights on 7.0", "math", V100, HALF, width=12),
    Case("sdp 415: no training of 200 on 8.9", "efficient", L4, HALF, width=200),
    Case("sdp 415: of 256 without dropout", "flash", L4, HALF, width=256),
    Case("sdp 415: not of 256 with dropout", "efficient", L4, HALF, width=256, dropout=0.1),
    Case("cpp 398: flash knows groups", "flash", A100, BRAIN, heads=2, grouped=True),
    Case("cpp 398: efficient knows none", "math", A100, SINGLE, heads=2, grouped=True),
    Case("sdp2.14 1149: or does", "efficient", A100, SINGLE, heads=2, grouped=True, torch=NEW),
    Case("cpp 398: masked groups", "math", A100, BRAIN, heads=2, grouped=True, mask="bool"),
    Case(
        *("sdp2.14 1149: masked groups", "efficient", A100, BRAIN),
        heads=2,
        grouped=True,
        mask="bool",
        torch=NEW,
    ),
    Case("cpp 398: one key head", "math", A100, BRAIN, heads=1),
    Case("sdp2.14 1150: one key head", "flash", A100, BRAIN, heads=1, torch=NEW),
    Case("sdp 498: more than one key", "flash", H100, BRAIN, keys=1),
    Case("cpp 496: no empty sequence", "math", A100, BRAIN, keys=0),
)


def called(case: Case) -> AttentionCall:
    query = torch.empty(2, 4, 16, case.width, dtype=case.dtype, requires_grad=True)
    key = torch.empty(2, case.heads, case.keys, case.width, dtype=case.dtype)
    value = torch.empty(2, case.heads, case.keys, case.values or case.width, dtype=case.dtype)
    mask = torch.ones(16, case.keys, dtype=torch.bool) if case.mask else None
    if case.mask == "learned":
        mask = torch.zeros(16, case.keys, dtype=case.dtype, requires_grad=True)
    return AttentionCall(query, key, value, mask, case.dropout, case.causal, case.grouped)


@pytest.mark.parametrize("case", CASES, ids=[case.line for case in CASES])
def test_the_kernel_is_the_one_of_the_source(case: Case) -> None:
    target = Target(case.capability, case.torch)
    assert attention_kernel(called(case), target) == case.kernel


def test_each_condition_names_its_line_and_some_call_breaks_it() -> None:
    broken = {
        condition.words
        for case in CASES
        for name, conditions in CONDITIONS.items()
        for condition in conditions
        if not condition.holds(called(case), Target(case.capability, case.torch))
    }
    conditions = {one.words: one for each in CONDITIONS.values() for one in each}
    assert all(one.source.line > 0 and one.source.note for one in conditions.values())
    rare = {
        "query, key and value have four dimensions",
        "no deterministic algorithms",
        "elements of a row are adjacent in memory",
    }
    assert {word for word in conditions if "batch size" not in word} - broken <= rare


def test_a_script_chooses_by_sdpa_kernel() -> None:
    call = called(Case("", "", A100, BRAIN))
    for backend, name in (
        (SDPBackend.MATH, "math"),
        (SDPBackend.EFFICIENT_ATTENTION, "efficient"),
        (SDPBackend.CUDNN_ATTENTION, "cudnn"),
    ):
        with sdpa_kernel(backend):
            assert attention_kernel(call, Target(A100)) == name
    with sdpa_kernel([SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION], set_priority=True):
        assert attention_kernel(call, Target(A100)) == "math"
    with (
        sdpa_kernel(SDPBackend.FLASH_ATTENTION),
        pytest.raises(RuntimeError, match=r"No available kernel.*flash: needs capability 8\.0"),
    ):
        attention_kernel(call, Target(V100))


# Saved beside query, key, value and output: dtype, shape, and whether it is on the device, for queries
# of (2, 4, 33, 16). Lines of `flash_attn/flash_api.cpp` (428) and `transformers/cuda/attention.cu`.
SAVED = {
    "flash": {
        "logsumexp": (torch.float32, (2, 4, 33), True),
        "rng_state": (torch.uint64, (2,), True),
        "unused": (torch.uint64, (), True),
    },
    "efficient": {
        "log_sumexp": (torch.float32, (2, 4, 64), True),
        "philox_seed": (torch.int64, (), True),
        "philox_offset": (torch.int64, (), True),
    },
    "cudnn": {
        "logsumexp": (torch.float32, (2, 4, 33, 1), True),
        "philox_seed": (torch.int64, (), True),
        "philox_offset": (torch.int64, (), True),
    },
}


@pytest.mark.parametrize(
    ("device", "dtype", "kernel"),
    [
        ("v100", HALF, "efficient"),
        ("a100", BRAIN, "flash"),
        ("a100", SINGLE, "efficient"),
        ("h100", BRAIN, "cudnn"),
    ],
)
def test_backward_keeps_what_it_keeps_on_the_device(
    device: str, dtype: torch.dtype, kernel: str
) -> None:
    with emulate(model_named(device)):
        query, key, value = (
            torch.randn(2, 33, 4, 16, device="cuda", dtype=dtype).transpose(1, 2).requires_grad_()
            for _ in range(3)
        )
        before = torch.cuda.memory_allocated()
        out: Any = F.scaled_dot_product_attention(query, key, value)
        kept = torch.cuda.memory_allocated() - before
        node = out.grad_fn
        assert kernel in node.name().lower()
        blocks = 0
        for name, (saved_dtype, shape, on) in SAVED[kernel].items():
            tensor = getattr(node, f"_saved_{name}")
            assert (tensor.dtype, tuple(tensor.shape), tensor.is_cuda) == (saved_dtype, shape, on)
            blocks += -(-tensor.nbytes // 512) * 512
        assert kept == -(-out.nbytes // 512) * 512 + blocks
        assert out.transpose(1, 2).is_contiguous()


def test_with_dropout_the_seed_of_efficient_attention_is_a_host_scalar() -> None:
    """`_efficient_attention_forward` unpacks the seed on the host if no graph is captured."""
    with emulate(model_named("v100")):
        query = torch.randn(1, 2, 8, 8, device="cuda", requires_grad=True)
        node: Any = F.scaled_dot_product_attention(query, query, query, dropout_p=0.5).grad_fn
        assert not node._saved_philox_seed.is_cuda
        assert node._saved_log_sumexp.is_cuda


def attended(query: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(query, query, query, dropout_p=0.5)


def run_through_cells(query: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(2)
    cells = torch.nn.LSTM(8, 8, num_layers=2, dropout=0.5, device="cuda")
    return cells(query.flatten(0, 1))[0]


@pytest.mark.parametrize("kernel", [attended, run_through_cells])
@pytest.mark.parametrize("dtype", [SINGLE, BRAIN])
def test_a_seed_that_was_copied_and_freed_draws_the_same_mask(kernel: Any, dtype: Any) -> None:
    """Offloading frees what a kernel saved and brings back a copy."""
    found = []
    for pack in (lambda saved: saved, torch.clone):
        with emulate(model_named("a100")):
            torch.manual_seed(0)
            query = torch.randn(2, 2, 8, 8, device="cuda", dtype=dtype, requires_grad=True)
            cast = torch.autocast("cuda", dtype, enabled=dtype != SINGLE)
            with cast, torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept):
                out = kernel(query)
            out.float().sum().backward()
            assert query.grad is not None
            found.append(query.grad.cpu())
    assert torch.equal(*found)


def test_flash_attention_pads_heads_to_eight_and_keeps_the_padded() -> None:
    with emulate(model_named("a100")):
        query = torch.randn(1, 2, 8, 12, device="cuda", dtype=BRAIN, requires_grad=True)
        out: Any = F.scaled_dot_product_attention(query, query, query)
        node = out.grad_fn.next_functions[0][0]
        assert out.shape == query.shape
        assert node._saved_query.shape[-1] == 16


@pytest.mark.parametrize("device", ["v100", "a100", "h100"])
def test_the_math_kernel_keeps_its_matrices(device: str) -> None:
    """In double precision no device has a fused kernel, though the CPU has."""
    with emulate(model_named(device)):
        query = torch.randn(1, 2, 64, 8, device="cuda", dtype=DOUBLE, requires_grad=True)
        profile = record_call(
            lambda: F.scaled_dot_product_attention(query, query, query), device="emulated"
        )
    names = {op.name.partition(".")[0] for op in profile.operators}
    assert {"aten::_softmax", "aten::bmm"} <= names or "aten::_safe_softmax" in names
    assert not any("scaled_dot_product" in name for name in names)


def results(place: str, dtype: torch.dtype, options: dict[str, Any], seed: int) -> list[Any]:
    """Output and gradients of a random call."""
    torch.manual_seed(seed)
    heads = 2 if options["enable_gqa"] else 4
    query, key, value = (
        torch.randn(2, n, options["length"], options["width"], dtype=dtype).to(place)
        for n in (4, heads, heads)
    )
    mask = torch.rand(options["length"], options["length"]) > 0.3
    mask[:, 0] = True
    given = {name: options[name] for name in ("dropout_p", "is_causal", "enable_gqa")}
    if options["masked"] and not options["is_causal"]:
        given["attn_mask"] = mask.to(place)
    sources = [one.requires_grad_() for one in (query, key, value)]
    torch.manual_seed(seed + 1)
    out = F.scaled_dot_product_attention(*sources, **given)
    torch.manual_seed(seed + 2)  # What backward draws again does not depend on it.
    out.square().sum().backward()
    return [one.detach().cpu() for one in (out, *(one.grad for one in sources)) if one is not None]


@settings(deadline=None, max_examples=40)
@given(
    model=st.sampled_from(["v100", "a100", "h100"]),
    dtype=st.sampled_from([HALF, BRAIN, SINGLE, DOUBLE]),
    options=st.fixed_dictionaries(
        {
            "length": st.integers(1, 40),
            "width": st.sampled_from([8, 10, 16, 64]),
            "dropout_p": st.sampled_from([0.0, 0.0, 0.125, 0.3]),
            "is_causal": st.booleans(),
            "enable_gqa": st.booleans(),
            "masked": st.booleans(),
        }
    ),
    seed=st.integers(0, 99),
)
def test_values_and_gradients_are_those_of_the_cpu(
    model: str, dtype: torch.dtype, options: dict[str, Any], seed: int
) -> None:
    with emulate(model_named(model)):
        found = results("cuda", dtype, options, seed)
        expected = results("cpu", dtype, options, seed)
    if options["width"] == 10 and dtype in (HALF, BRAIN) and model != "v100":
        # Flash attention pads these heads, which changes the order of sums.
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=0.05, atol=0.05)
        return
    assert all(map(torch.equal, found, expected))


@settings(deadline=None, max_examples=60)
@given(
    st.integers(0, 3),
    st.integers(1, 9),
    st.integers(1, 9),
    st.sampled_from([(4, 4), (4, 2), (4, 1)]),
    st.sampled_from([0.0, 0.2]),
    st.booleans(),
)
def test_the_cpus_own_choice_is_known(
    bias: int, queries: int, keys: int, heads: tuple[int, int], dropout: float, strided: bool
) -> None:
    query = torch.randn(2, heads[0], queries, 8)
    key, value = torch.randn(2, 2, heads[1], keys, 8)
    if strided:
        key = key.mT.contiguous().mT
    mask = torch.randn(queries, keys).requires_grad_(bias == 2) if bias else None
    choice = torch._fused_sdp_choice(
        *(query, key, value, mask, dropout, False), enable_gqa=heads[0] != heads[1]
    )
    call = _Arguments(query, key, value, mask, dropout, False, None)
    assert call.is_flash_on_cpu() == (choice == int(SDPBackend.FLASH_ATTENTION.value))


def test_a_device_by_amd_runs_the_kernels_of_the_cpu() -> None:
    model = model_named("mi300x")
    assert model.target() is None
    with emulate(model):
        query = torch.randn(1, 2, 8, 8, device="cuda", requires_grad=True)
        out: Any = F.scaled_dot_product_attention(query, query, query)
        assert out.grad_fn.name() == "ScaledDotProductFlashAttentionForCpuBackward0"
