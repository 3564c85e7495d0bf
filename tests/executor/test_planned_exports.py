"""A planned model is scripted, traced, exported, quantized and transformed as if it had no plan."""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from positions import WindowAttention
from torchtrim.errors import ApplyFailed
from torchtrim.executor.registry import Handle, technique
from torchtrim.executor.swap import is_swapped
from torchtrim.records.plan import Technique
from torchtrim.techniques.precision import TECHNIQUE as PRECISION

pytestmark = pytest.mark.filterwarnings("ignore")
QUICKLY = {"export": ("recompute",), "compile": ("recompute", "replay")}
MOSTLY = ("recompute", "replay", "overwrite")
LOWERED = ("deepcopy", "vmap", "jvp", "compile")
"""What computes in the plan's precision too, since it may be of the training."""
Options = dict[str, Any]


class Net(nn.Module):
    """A place for each technique."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        self.mlp = nn.Sequential(nn.Linear(36, 48), nn.ReLU(), nn.Linear(48, 36))
        self.head = nn.Linear(36, 40)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x).flatten(2).transpose(1, 2).reshape(x.shape[0], -1, 36)
        return self.head(y + self.mlp(y))


PLANS: dict[str, tuple[str, Options]] = {
    "recompute": ("Net.mlp", {}),
    "replay": ("Net:relu.0", {}),
    "overwrite": ("Net.mlp.1", {}),
    "offload_activations": ("Net:relu.0 until end from relu.1", {}),
    "micro_batch": ("Net.mlp", {"parts": 2}),
    "split_channels": ("Net.conv[1:3]", {"parts": 2, "overwrites": False}),
    "split_matmul": ("Net.mlp", {"parts": 2}),
    "chunked_loss": ("Net.head", {"rows": 8}),
    "precision": ("Net", {"of": "compute", "dtype": "bfloat16"}),
}


class Recurrent(nn.Module):
    """A place for split_time."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(6, 8, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out, _ = self.rnn(x)
        return out


def gated(x: torch.Tensor, power: float = 2.0) -> torch.Tensor:
    return torch.sigmoid(x).pow(power) * x


class Calling(nn.Module):
    """A place for recompute_function."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return gated(self.layer(x), power=3.0)


class Positions(nn.Module):
    """A place for relative_attention."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = WindowAttention()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.attn(x)
        return out


OTHERS: dict[str, tuple[type[nn.Module], str, tuple[int, ...]]] = {
    "split_time": (Recurrent, "Net.rnn", (4, 5, 6)),
    "recompute_function": (Calling, f"Net:{__name__}.gated", (4, 5, 6)),
    "relative_attention": (Positions, "Net.attn", (3, 49, 32)),
}


def saved(model: nn.Module, *_: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def on_fake_tensors(model: nn.Module, x: torch.Tensor) -> Any:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        return tuple(model(mode.from_tensor(x)).shape)


QUICK: dict[str, Callable[[nn.Module, torch.Tensor], Any]] = {
    "jit.script": lambda model, _: torch.jit.script(model),
    "jit.trace": lambda model, x: torch.jit.trace(model, x),
    "fx": lambda model, _: torch.fx.symbolic_trace(model),
    "make_fx": lambda model, x: make_fx(model)(x),
    "deepcopy": lambda model, _: copy.deepcopy(model),
    "save": saved,
    "fake": on_fake_tensors,
    "vmap": lambda model, x: torch.vmap(model)(x[None]),
    "jvp": lambda model, x: torch.func.jvp(model, (x,), (x,)),
}


def onnx(model: nn.Module, x: torch.Tensor, *, dynamo: bool) -> Any:
    pytest.importorskip("onnxscript")
    file = io.BytesIO()
    made = torch.onnx.export(model, (x,), file, dynamo=dynamo)
    return [node.op_type for node in made.model.graph] if made is not None else file.getvalue()


def quantized(model: nn.Module, x: torch.Tensor) -> Any:
    from torch.ao.quantization import get_default_qconfig_mapping
    from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx

    prepared = prepare_fx(model, get_default_qconfig_mapping(), (x,))
    prepared(x)
    return convert_fx(prepared)


SLOW: dict[str, Callable[[nn.Module, torch.Tensor], Any]] = {
    "export": lambda model, x: torch.export.export(model, (x,)).module(),
    "export, strict": lambda model, x: torch.export.export(model, (x,), strict=True).module(),
    "compile": lambda model, _: torch.compile(model, backend="eager", fullgraph=True),
    "onnx": lambda model, x: onnx(model, x, dynamo=False),
    "onnx by dynamo": lambda model, x: onnx(model, x, dynamo=True),
    "quantize": quantized,
}


def applied(name: str, net: nn.Module, where: str, options: Options) -> Handle:
    return technique(name).apply(
        {"Net": net}, Technique(name=name, where=(where,), options=options)
    )


def made_by(export: Callable[[nn.Module, torch.Tensor], Any], name: str = "") -> Any:
    """What it returns, and its results if it can be called, for a model that has trained under a plan."""
    torch.manual_seed(0)
    net, x = Net(), torch.randn(4, 2, 11, 11)
    if name:
        applied(name, net, *PLANS[name])
        assert any(map(is_swapped, net.modules()))
        net(x).square().sum().backward()
        for norm in (one for one in net.modules() if isinstance(one, nn.BatchNorm2d)):
            norm.reset_running_stats()
        net.zero_grad()
    net.eval()
    made = export(net, x)
    if not callable(made):
        return made
    given = x.clone()
    found = [made(given) + 0 for _ in range(2)]
    assert torch.equal(given, x)
    return found


def made_of(export: Callable[[nn.Module, torch.Tensor], Any], name: str, *, planned: bool) -> Any:
    """The same for a technique that needs a model of its own, in inference.

    A graph of fx calls torch's own layers as they are, so with their plan where they train.
    """
    torch.manual_seed(0)
    kind, where, shape = OTHERS[name]
    net, x = kind(), torch.randn(shape)
    with contextlib.ExitStack() as reverted:
        if planned:
            reverted.callback(applied(name, net, where, {}).revert)
            net(x).square().sum().backward()
            net.zero_grad()
        made = export(net.eval(), x)
        with torch.no_grad():
            return made(x) if callable(made) else made


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.mark.parametrize(
    "name", [one if one in MOSTLY else pytest.param(one, marks=pytest.mark.slow) for one in PLANS]
)
def test_exports_see_the_models_own_forward(name: str) -> None:
    for how, export in QUICK.items():
        is_same = same(made_by(export), made_by(export, name))
        assert is_same != (name == "precision" and how in LOWERED), how


@pytest.mark.parametrize(
    ("how", "name"),
    [
        pytest.param(how, name, marks=() if name in QUICKLY.get(how, ()) else pytest.mark.slow)
        for how in SLOW
        for name in PLANS
    ],
)
def test_compilers_see_the_models_own_forward(how: str, name: str) -> None:
    is_same = same(made_by(SLOW[how]), made_by(SLOW[how], name))
    assert is_same != (name == "precision" and how in LOWERED)


@pytest.mark.parametrize("how", ["jit.trace", "make_fx", "compile", "export"])
def test_what_is_made_of_a_model_in_half_precision_is_as_by_hand(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    export = {**QUICK, **SLOW}[how]
    planned = made_by(export, "precision")
    monkeypatch.setattr(PRECISION, "apply", PRECISION.by_hand)
    monkeypatch.setattr(f"{__name__}.is_swapped", lambda _: True)
    assert same(made_by(export, "precision"), planned)


UNSUPPORTED = {
    ("vmap", "split_time"),  # by torch, without a plan too
    ("compile", "split_time"),
    ("jit.script", "relative_attention"),
}
COMPILED = {("compile", "relative_attention")}
"""Where the plan's own kernel is compiled."""


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize(
    "how",
    [
        *QUICK,
        *(pytest.param(one, marks=pytest.mark.slow) for one in ("export", "export, strict")),
        *(pytest.param(one, marks=pytest.mark.slow) for one in ("compile", "onnx")),
    ],
)
def test_models_of_other_plans_are_exported_as_if_they_had_none(how: str, name: str) -> None:
    if (how, name) in UNSUPPORTED:
        pytest.skip("torch refuses the model without a plan")
    export = {**QUICK, **SLOW}[how]
    original, planned = (made_of(export, name, planned=one) for one in (False, True))
    assert same(original, planned) != ((how, name) in COMPILED)


def test_copies_of_another_function_compute_it_and_scripts_are_refused() -> None:
    net, x = Net(), torch.randn(4, 2, 11, 11)
    handle = applied("replace_norm", net, "Net", {"to": "group", "groups": 2})
    expected, copied = net(x), copy.deepcopy(net)
    for other in (copied, saved(net), torch.jit.trace(net, x)):
        assert torch.equal(other(x), expected)
    with torch.no_grad():
        copied.conv[1].weight.mul_(2)  # type: ignore[operator, union-attr]
    assert not torch.equal(copied(x), expected)
    assert torch.equal(net(x), expected)
    with pytest.raises(ApplyFailed, match=r"torch.jit.script compiles .* `revert\(\)`"):
        torch.jit.script(net)
    handle.revert()
    assert "forward" not in vars(copy.deepcopy(net).conv[1])  # type: ignore[operator]
    torch.jit.script(net)
