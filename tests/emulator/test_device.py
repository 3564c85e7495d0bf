"""A program for CUDA computes on the emulated device what it computes on the CPU, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from emulator import snippets_of_training as more
from emulator.snippets import SNIPPETS
from torchtrim import UsageError
from torchtrim.dispatch.patches import Patches
from torchtrim.emulator import current, emulate

ON_HOST = {"reading", "to_numpy", "packed_sequences"}


def run(name: str, device: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    found = SNIPPETS[name](device)
    if name not in ON_HOST:
        assert {tensor.device.type for tensor in found} == {device}
    return [tensor.detach().cpu() for tensor in found]


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.is_sparse:
        a, b = a.to_dense(), b.to_dense()
    return a.dtype == b.dtype and bool(torch.equal(a.nan_to_num(), b.nan_to_num()))


def test_the_battery_is_large() -> None:
    assert len(SNIPPETS) >= 60
    assert set(more.OPTIMIZERS) <= set(SNIPPETS)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
@pytest.mark.parametrize("name", SNIPPETS)
def test_a_snippet_computes_what_it_does_on_the_cpu(name: str) -> None:
    expected = run(name, "cpu")
    with emulate():
        found = run(name, "cuda")
    assert len(found) == len(expected)
    assert all(map(same, expected, found))


@pytest.fixture
def owners(monkeypatch: pytest.MonkeyPatch) -> dict[int, Any]:
    """Modules and classes of which something is replaced, found by replacing it all once."""
    found: dict[int, Any] = {}
    own = Patches.replace

    def replace(self: Patches, owner: Any, name: str, value: Any) -> Any:
        found[id(owner)] = owner
        return own(self, owner, name, value)

    monkeypatch.setattr(Patches, "replace", replace)
    with emulate():
        pass
    return found


def attributes(owners: dict[int, Any]) -> dict[tuple[int, str], Any]:
    return {
        (number, name): value
        for number, owner in owners.items()
        for name, value in vars(owner).items()
        if name not in ("__warningregistry__", "__slotnames__")  # Caches of warnings and copyreg.
    }


def test_everything_is_put_back(owners: dict[int, Any]) -> None:
    before = attributes(owners)
    registry = list(torch.serialization._package_registry)
    with emulate():
        for name in ("dropout", "one_hot", "checkpoints_on_disk", "loaders"):
            SNIPPETS[name]("cuda")
        with torch.autocast("cuda"):
            torch.nn.Linear(2, 2).cuda()(torch.ones(1, 2, device="cuda"))
    after = attributes(owners)
    assert before.keys() == after.keys()
    assert not [key[1] for key in before if before[key] is not after[key]]
    assert registry == torch.serialization._package_registry
    assert len(owners) > 20


def test_a_failing_script_is_cleaned_up_after(owners: dict[int, Any]) -> None:
    before = attributes(owners)
    with pytest.raises(ZeroDivisionError), emulate():
        raise ZeroDivisionError
    assert not [key[1] for key, value in attributes(owners).items() if value is not before[key]]
    assert current() is None


def test_autocast_of_the_host_is_as_before() -> None:
    before = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
    with emulate(), torch.autocast("cuda", torch.float16):
        pass
    assert (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")) == before


def test_tensors_of_the_device_are_plain_ones_afterwards() -> None:
    with emulate():
        x = torch.ones(3, device="cuda")
        assert x.is_cuda
    assert x.device.type == "cpu"
    assert torch.equal(x + torch.ones(3), torch.full((3,), 2.0))


def test_there_is_one_device() -> None:
    with emulate() as emulation:
        assert current() is emulation
        with pytest.raises(UsageError, match="already emulated"), emulate():
            pass
        assert current() is emulation
    assert current() is None


def test_the_device_of_a_context_goes_for_what_is_made_in_it_only() -> None:
    with emulate():
        with torch.device("cuda"):
            assert torch.tensor([1.0]).is_cuda
            assert torch.nn.Linear(2, 2).weight.is_cuda
        assert not torch.tensor([1.0]).is_cuda
    with torch.device("meta"):
        assert torch.tensor([1.0]).is_meta


@pytest.mark.parametrize("device", ["cuda", "cpu", None])
def test_a_default_device(device: str | None) -> None:
    with emulate():
        torch.set_default_device(device)
        try:
            made = [torch.zeros(2), torch.tensor([1.0]), torch.as_tensor([2]), torch.rand(1)]
        finally:
            torch.set_default_device(None)
        assert {tensor.is_cuda for tensor in made} == {device == "cuda"}
