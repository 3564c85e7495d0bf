"""Whether a step can be captured in a CUDA graph: constructed steps on an emulated device, and profiles."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from torch import nn

import torchtrim
from profiles import SCRIPT, Step
from torchtrim.records.finding import Finding
from torchtrim.records.profile import Profile
from torchtrim.rules.registry import diagnose
from torchtrim.rules.tt402_blocks_capture import check, verdict

# fmt: off
STEPS = [
    # (body of a step over x, y of the device and h of the host; what is in the way of it)
    ("z = x @ x.T", ""),
    ("z = torch.relu(x).sum()", ""),
    ("z = x.masked_fill(x > 0, 0.0)", ""),
    ("x.add_(1)", ""),
    ("z = nn.functional.dropout(x, 0.5)", ""),
    ("z = torch.rand(3, device='cuda')", ""),
    ("z = torch.where(x > 0, x, y)", ""),
    ("z = x.sort().values", ""),
    ("z = nn.functional.one_hot(i, 8)", ""),
    ("z = x.repeat_interleave(2, dim=0)", ""),
    ("z = torch.full((), 0.5, device='cuda')", ""),
    ("z = torch.zeros(4, device='cuda')", ""),
    ("w.grad = None; (w * x).sum().backward()", ""),
    ("z = nn.functional.cross_entropy(x, i[:4])", ""),
    ("z = x.cumsum(0).clamp(max=2.0)", ""),
    ("z = x.sum().item()", "waits for the device"),
    ("z = float(x.sum())", "waits for the device"),
    ("z = x.tolist()", "waits for the device"),
    ("z = x.cpu()", "waits for the device"),
    ("if x.sum() > 0: z = x", "waits for the device"),
    ("z = x[x > 0]", "waits for the device"),
    ("z = x.nonzero()", "waits for the device"),
    ("z = x.unique()", "waits for the device"),
    ("z = torch.masked_select(x, x > 0)", "waits for the device"),
    ("z = nn.functional.one_hot(i)", "waits for the device"),
    ("z = x.repeat_interleave(i[:4], dim=0)", "waits for the device"),
    ("torch.cuda.synchronize()", "waits for the device"),
    ("torch.cuda.current_stream().synchronize()", "waits for the device"),
    ("print(x.sum())", "waits for the device"),
    ("z = torch.tensor([1.0, 2.0], device='cuda')", "waits for the device"),
    ("z = h.to('cuda')", "waits for the device"),
    ("z = p.to('cuda', non_blocking=True)", "host memory"),
    ("x.copy_(p, non_blocking=True)", "host memory"),
    ("z = x * torch.tensor(2.0)", "tensor on the host"),
    ("z = x + s", "tensor on the host"),
    ("z = torch.rand(3, device='cuda', generator=g)", "generator"),
    ("x.normal_(\n        generator=g)", "generator"),
    ("z = torch.randn(4).to('cuda')", "waits for the device"),
    ("for one in x: one.sum().item()", "waits for the device"),
    ("torch.nn.utils.clip_grad_norm_([w], 1.0, error_if_nonfinite=True)", "waits for the device"),
]
# fmt: on


def profile_of(step: Callable[[], object], folder: Path) -> Profile:
    profile = torchtrim.measure(step, project=folder, warmup=1).profile
    assert profile is not None
    return profile


def made(body: str, folder: Path) -> Callable[[], object]:
    """The step as a file of its own, so that it has lines."""
    text = f"import torch\nfrom torch import nn\ndef step():\n    {body}\n"
    path = folder / "step.py"
    path.write_text(text)
    names: dict[str, object] = {}
    exec(compile(text, str(path), "exec"), names)  # the test's own text
    return names["step"]  # type: ignore[return-value]


def found_in(body: str, folder: Path) -> list[Finding]:
    step = made(body, folder)

    def run() -> None:
        names = step.__globals__  # type: ignore[attr-defined]
        if "x" not in names:
            names["x"] = torch.arange(16.0).reshape(4, 4).cuda()
            names["y"], names["w"] = (
                torch.ones(4, 4).cuda(),
                torch.ones(4, 4).cuda().requires_grad_(),
            )
            names["w"].grad = torch.ones(4, 4).cuda()
            names["i"], names["h"] = torch.tensor([0, 1, 2, 3, 1]).cuda(), torch.ones(4, 4)
            names["p"], names["s"] = torch.ones(4, 4).pin_memory(), torch.tensor(3.0)
            names["g"] = torch.Generator("cuda")
        step()

    return list(check(profile_of(run, folder)))


@pytest.mark.parametrize(("body", "said"), STEPS, ids=[body for body, _ in STEPS])
def test_what_is_in_the_way(body: str, said: str, tmp_path: Path) -> None:
    found = found_in(body, tmp_path)
    assert {one.code for one in found} <= {"TT402"}
    assert bool(found) == bool(said), found
    assert all(said in one.message for one in found), found
    assert all(one.line in (4, 5) and one.path.endswith("step.py") for one in found), found


OPTIMIZERS = [
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, False),
    (torch.optim.Adam, {}, True),
    (torch.optim.AdamW, {"foreach": False}, True),
    (torch.optim.AdamW, {"capturable": True}, False),
    (torch.optim.AdamW, {"fused": True}, False),
    (torch.optim.RMSprop, {}, True),
]


@pytest.mark.parametrize(("kind", "words", "counts"), OPTIMIZERS)
def test_optimizers_that_count_on_the_host(
    kind: Callable[..., torch.optim.Optimizer],
    words: dict[str, object],
    counts: bool,
    tmp_path: Path,
) -> None:
    layer, kept = nn.Linear(4, 4), []

    def run() -> None:
        if not kept:
            layer.cuda()
            kept.extend([kind(layer.parameters(), **words), torch.ones(2, 4).cuda()])
        kept[0].zero_grad()
        layer(kept[1]).sum().backward()
        kept[0].step()

    found = list(check(profile_of(run, tmp_path)))
    assert bool(found) is counts
    assert all("capturable=True" in one.fix.reason for one in found if one.fix)


def test_collectives_and_the_unknown_are_named() -> None:
    step = Step("cuda:0")
    x = step.alive("activation", 64)
    step.op("c10d::allreduce_", x, line=3)
    step.op("xformers::mha", x, makes=64, line=4)
    step.op("torchvision::roi_align", x, makes=64, line=5)
    found = {one.line: one.message for one in check(step.profile())}
    assert set(found) == {3, 4}
    assert "NCCL" in found[3]
    assert "was not read" in found[4]


def test_lines_of_a_library_stand_beside_the_users_own() -> None:
    step = Step("cuda:0")
    value, own = step.alive("activation", 4), step._place(SCRIPT, 3)
    read = step.op("aten::_local_scalar_dense", value, line=12, path="/lib/a/model.py")
    step.op("c10d::allreduce_", value, line=89, path="/lib/a/loop.py")
    step.operators[:] = [replace(one, caller=own) for one in step.operators]
    step.sync("item", read)
    messages = [one.message for one in check(step.profile()) if one.line == 3]
    assert [one.partition("inside ")[2].partition(" in ")[0] for one in messages] == [
        "a/model.py:12",
        "a/loop.py:89",
    ]


def test_it_is_looked_for_only_where_it_is_asked_for() -> None:
    step = Step("cuda:0")
    step.op("c10d::allreduce_", step.alive("activation", 64), line=3)
    profile = step.profile()
    assert "TT402" not in {one.code for one in diagnose(profile)}
    assert [one.code for one in diagnose(profile, ["TT402"])] == ["TT402"]
    assert verdict(profile, 1).startswith("capturable: no, 1 line is in the way")
    assert verdict(profile, 0).startswith("capturable: yes")
    assert verdict(Step().profile(), 0).startswith("capturable: unknown")
