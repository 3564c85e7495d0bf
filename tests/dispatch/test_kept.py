from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from torchtrim.capture.one_call import record_call
from torchtrim.dispatch.kept import Kept, counts_tell, is_kept
from torchtrim.records.profile import Profile, Storage
from torchtrim.step.from_profile import step_of

tells = pytest.mark.skipif(not counts_tell(), reason="this torch counts references in another way")


def recorded(function: Callable[[], Any]) -> Profile:
    return record_call(function, device="cpu")


def made_by(profile: Profile, name: str) -> Storage:
    index = next(i for i, op in enumerate(profile.operators) if op.name == name)
    return profile.storages[profile.operators[index].outputs[0].storage]


def place_of(profile: Profile, name: str) -> int:
    return next(i for i, op in enumerate(profile.operators) if op.name == name)


WEIGHT = torch.full((64,), 0.5, requires_grad=True)


def kept_as_local() -> torch.Tensor:
    made = WEIGHT.exp()
    return (made.sin().cos() * 2).sum()


def named_anew() -> torch.Tensor:
    x = WEIGHT.exp()
    x = x.sin()
    x = x.cos()
    return (x * 2).sum()


@tells
def test_a_local_is_kept_until_its_function_ends() -> None:
    def step() -> None:
        kept_as_local().backward()

    profile = recorded(step)
    made = made_by(profile, "aten::exp.default")
    assert made.kept == place_of(profile, "aten::sum.default") + 1
    assert made.death > made.kept


@tells
def test_a_name_given_to_another_tensor_keeps_the_first_no_longer() -> None:
    profile = recorded(lambda: named_anew().backward())
    assert made_by(profile, "aten::exp.default").kept == place_of(profile, "aten::cos.default")


@tells
def test_a_list_keeps_to_the_end() -> None:
    logged: list[torch.Tensor] = []

    def step() -> None:
        logged.append(WEIGHT.exp())
        logged[0].sin().sum().backward()

    profile = recorded(step)
    assert made_by(profile, "aten::exp.default").kept == len(profile.operators)


@tells
def test_a_view_keeps_its_storage() -> None:
    def step() -> None:
        view = WEIGHT.exp().view(8, 8)
        view.sin().cos().sum().backward()
        del view

    profile = recorded(step)
    assert made_by(profile, "aten::exp.default").kept == len(profile.operators)


@tells
def test_without_what_autograd_saved_a_local_is_still_there() -> None:
    profile = recorded(lambda: kept_as_local().backward())
    made = profile.operators[place_of(profile, "aten::exp.default")].outputs[0].storage
    rest, *saved = step_of(profile).tensors[made].holds
    assert saved
    assert rest.until == place_of(profile, "aten::sum.default") + 1


def test_a_torch_that_counts_otherwise_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchtrim.dispatch.storages.counts_tell", lambda: False)
    profile = recorded(lambda: kept_as_local().backward())
    assert {storage.kept for storage in profile.storages} == {-1}


@tells
def test_many_objects_are_looked_at_in_turns() -> None:
    gone: list[int] = []
    kept = Kept(gone.append)
    tensors = [torch.zeros(1) for _ in range(100)]
    for number, tensor in enumerate(tensors):
        kept.add(tensor, number)
    del tensor
    tensors.clear()
    kept.sweep(1)
    assert not gone
    kept.sweep(4)
    assert sorted(gone) == list(range(100))


@tells
def test_an_object_that_died_is_not_kept() -> None:
    tensor = torch.zeros(1)
    reference = weakref.ref(tensor)
    assert is_kept(reference)
    del tensor
    assert not is_kept(reference)
