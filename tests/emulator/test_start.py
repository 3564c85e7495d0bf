from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from torchtrim.capture.waits import sync_detector
from torchtrim.emulator import Emulation, current
from torchtrim.emulator.start import OnDemand

REPLACED = (torch, torch.cuda, torch.accelerator, torch.Tensor)


class Sources:
    """A script of a user, and a library that is not."""

    def __init__(self, root: Path) -> None:
        self.project = root / "project"
        self._library = root / "lib" / "site-packages"

    def users(self, source: str) -> Any:
        """The function `go` of a script with this source."""
        return self._module(self.project, source)

    def librarys(self, source: str) -> Any:
        """The function `go` of a library."""
        return self._module(self._library, source)

    def _module(self, folder: Path, source: str) -> Any:
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / "code.py"
        text = f"import torch\ndef go(*args):\n    return {source}\n"
        file.write_text(text)
        module = ModuleType("code")
        exec(compile(text, str(file), "exec"), module.__dict__)
        return module.go


@pytest.fixture
def sources(tmp_path: Path) -> Iterator[Sources]:
    """An emulation that waits to be asked for, and who may ask."""
    found = Sources(tmp_path)
    emulation = Emulation()
    asked = OnDemand(emulation, str(found.project))
    asked.arm()
    yield found
    asked.disarm()
    if current() is emulation:
        emulation.end()


@pytest.mark.parametrize(
    "question",
    [
        "torch.cuda.is_available()",
        "torch.cuda.device_count() == 1",
        "torch.accelerator.is_available()",
        "torch.accelerator.current_accelerator().type == 'cuda'",
    ],
)
def test_the_users_own_question_begins_it(sources: Sources, question: str) -> None:
    assert current() is None
    assert sources.users(question)()
    assert current() is not None
    assert torch.ones(1, device="cuda").is_cuda


def test_a_librarys_question_does_not(sources: Sources) -> None:
    assert not sources.librarys("torch.cuda.is_available()")()
    assert not sources.librarys("torch.cuda.device_count()")()
    assert current() is None


def test_a_librarys_question_on_the_users_behalf_does_not(sources: Sources) -> None:
    library = sources.librarys("torch.cuda.is_available()")
    assert not sources.users("args[0]()")(library)
    assert current() is None


def test_questions_of_torch_and_torchtrim_for_themselves_do_not(sources: Sources) -> None:
    """A recorder asks for a device to wait for, NAdam for a graph, `DataParallel` for devices to copy to."""
    assert sources.users("args[0](None, None)")(sync_detector) is None
    weight = torch.ones(2, requires_grad=True)
    weight.grad = torch.ones(2)
    sources.users("args[0].step()")(torch.optim.NAdam([weight]))
    sources.users("args[0].random.fork_rng().__enter__()")(torch)
    linear = torch.nn.Linear(2, 2)
    parallel = sources.users("torch.nn.DataParallel(args[0])(args[1])")(linear, torch.ones(1, 2))
    assert not parallel.is_cuda
    sources.users("torch.jit.trace(args[0], args[1])")(linear, torch.ones(1, 2))
    assert current() is None


@pytest.mark.parametrize(
    "asking",
    [
        "torch.ones(1).cuda()",
        "torch.ones(1).to('cuda')",
        "torch.ones(1).to(torch.device('cuda', 0))",
        "torch.ones(1).to(device='cuda:0', non_blocking=True)",
        "torch.tensor([1.0], device='cuda')",
        "torch.as_tensor([1.0], device='cuda')",
        "torch.nn.Linear(2, 2).cuda().weight",
        "torch.nn.Linear(2, 2).to('cuda').weight",
        "torch.rand(1, device='cuda', generator=torch.Generator('cuda'))",
        "torch.ones(1).type('torch.cuda.DoubleTensor')",
        "torch.nn.Linear(2, 2).type(torch.cuda.HalfTensor).weight",
        "torch.cuda.FloatTensor(2, 3)",
        "torch.cuda.LongTensor([1, 2])",
    ],
)
@pytest.mark.parametrize("who", ["users", "librarys"])
def test_whoever_asks_for_a_device_begins_it(sources: Sources, who: str, asking: str) -> None:
    made = getattr(sources, who)(asking)()
    assert current() is not None
    assert made.is_cuda


@pytest.mark.filterwarnings("ignore:torch.set_default_tensor_type:UserWarning")
@pytest.mark.parametrize(
    ("asking", "dtype"),
    [
        ("torch.set_default_device('cuda')", torch.float32),
        ("torch.set_default_device(torch.device('cuda', 0))", torch.float32),
        ("torch.set_default_device(device='cuda')", torch.float32),
        ("torch.set_default_tensor_type('torch.cuda.FloatTensor')", torch.float32),
        ("torch.set_default_tensor_type(torch.cuda.DoubleTensor)", torch.float64),
    ],
)
@pytest.mark.parametrize("who", ["users", "librarys"])
def test_a_default_that_is_the_device_begins_it(
    sources: Sources, who: str, asking: str, dtype: torch.dtype
) -> None:
    getattr(sources, who)(asking)()
    try:
        assert current() is not None
        made = torch.ones(2)
        assert made.is_cuda
        assert made.dtype is dtype
    finally:
        torch.set_default_tensor_type("torch.FloatTensor")
        torch.set_default_device(None)


def test_a_default_of_the_host_begins_nothing(sources: Sources) -> None:
    torch.set_default_device("cpu")
    torch.set_default_device(None)
    assert not isinstance(torch.ones(1), torch.cuda.FloatTensor)
    assert torch.ones(1).type(torch.DoubleTensor).type("torch.FloatTensor").is_cpu
    assert current() is None


def test_a_type_of_the_device_that_was_kept_is_the_same_type(sources: Sources) -> None:
    kind = torch.cuda.FloatTensor
    made = kind([1.0])
    assert isinstance(made, kind)
    assert not isinstance(made.cpu(), kind)
    assert kind(2).is_cuda


def test_a_factory_begins_it(tmp_path: Path) -> None:
    """In a process of its own: torch asks for a device once in its life."""
    script = (
        "import torch\n"
        "from torchtrim.emulator import Emulation\n"
        "from torchtrim.emulator.start import OnDemand\n"
        f"OnDemand(Emulation(), {str(tmp_path)!r}).arm()\n"
        "assert torch.zeros(2, device='cuda').is_cuda\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_who_asks_for_nothing_begins_nothing(sources: Sources) -> None:
    x = torch.ones(2).to("cpu").to(torch.float64)
    model = nn.Linear(2, 2).to(torch.device("cpu"))
    assert torch.tensor([1.0], device="cpu").is_cpu
    assert torch.as_tensor([1.0]).is_cpu
    own = torch.Generator()
    assert (own.device.type, type(own).__qualname__) == ("cpu", "Generator")
    assert isinstance(torch.default_generator, torch.Generator)
    assert model(x.float()).is_cpu
    assert current() is None


def test_the_question_is_answered_by_the_device_from_then_on(sources: Sources) -> None:
    sources.users("torch.cuda.is_available()")()
    assert sources.librarys("torch.cuda.is_available()")()
    assert torch.cuda.get_device_properties(0).total_memory > 0


def test_torch_is_as_it_was_if_nobody_asks(tmp_path: Path) -> None:
    before = [dict(vars(owner)) for owner in REPLACED]
    asked = OnDemand(Emulation(), str(tmp_path))
    asked.arm()
    torch.ones(2).to(torch.float64)
    asked.disarm()
    for owner, attributes in zip(REPLACED, before, strict=True):
        now = vars(owner)
        assert not [name for name in attributes if now[name] is not attributes[name]]


def test_torch_is_as_it_was_after_it_ended(tmp_path: Path) -> None:
    before = [dict(vars(owner)) for owner in REPLACED]
    emulation = Emulation()
    OnDemand(emulation, str(tmp_path)).arm()
    torch.ones(2).cuda()
    emulation.end()
    for owner, attributes in zip(REPLACED, before, strict=True):
        now = vars(owner)
        assert not [name for name in attributes if now[name] is not attributes[name]]
