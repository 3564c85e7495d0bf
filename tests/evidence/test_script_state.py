"""What a script keeps in its own variables: what changes is seen, what each step makes anew is not."""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchtrim.dispatch.places import Places
from torchtrim.evidence.script_state import UNCHANGED, ScriptState

HERE = str(Path(__file__).parent)
Found = dict[str, torch.Tensor | str]


class Average:
    """An average of weights, as scripts write them."""

    def __init__(self, size: int = 3) -> None:
        self.shadow = {"weight": torch.zeros(size)}
        self.updates = 0

    def __call__(self) -> None:
        self.shadow["weight"] += 1
        self.updates += 1


def looks(script: Callable[[Callable[[], None]], Any], number: int = -1) -> list[Found]:
    """What is seen of a script, each time that it calls what it is given."""
    state = ScriptState(Places(HERE), lambda _: number)
    found: list[Found] = []

    def look() -> None:
        found.append(dict(state.changes(sys._getframe(1))))

    script(look)
    return found


def names(found: Found) -> set[str]:
    """What has changed, of `script`."""
    return {
        name.removeprefix("script.")
        for name, value in found.items()
        if name.startswith("script.") and value is not UNCHANGED and value != UNCHANGED
    }


def test_counters_containers_and_objects_are_seen_where_they_change() -> None:
    def script(look: Callable[[], None]) -> None:
        average, history, recent, kept, count, name = Average(), [0], deque([1]), {"a": 0}, 0, "one"
        look()
        average()
        history.append(1)
        recent.append(2)
        count += 1
        look()
        kept["a"] = 5
        name = "two"
        look()
        assert count
        assert name

    first, second, third = looks(script)
    assert not first
    assert names(second) == {"average", "average.0", "history", "recent", "count"}
    assert names(third) == {"kept", "name", "average.0"}
    assert third["script.history"] == UNCHANGED


def test_a_large_tensor_is_seen_where_it_is_written_alone() -> None:
    def script(look: Callable[[], None]) -> None:
        average = Average(100_000)
        look()
        look()
        look()
        average.shadow["weight"].mul_(2)
        look()

    *_, third, fourth = looks(script)
    assert third["script.average.0"] == UNCHANGED
    assert isinstance(fourth["script.average.0"], torch.Tensor)


def test_what_a_step_makes_anew_does_not_count_and_is_not_kept() -> None:
    gone: list[weakref.ref[torch.Tensor]] = []

    def script(look: Callable[[], None]) -> None:
        weight = torch.ones(3, requires_grad=True)
        for number in range(3):
            hidden = (weight * number).exp()
            losses, batch, elapsed = [hidden], {"x": torch.zeros(100_000)}, 0.5 * number
            look()
            gone.extend((weakref.ref(hidden), weakref.ref(batch["x"])))
            assert losses
            assert elapsed >= 0
            del hidden, losses, batch
            assert all(one() is None for one in gone)

    for found in looks(script):
        assert not {"hidden", "hidden.0", "elapsed", "batch.0"} & names(found)


def test_a_list_of_tensors_made_in_each_step_lives_no_longer() -> None:
    """As of gradients by sharpness-aware steps: kept, it would count in the next step's peak."""
    state = ScriptState(Places(HERE), lambda _: -1)
    kept = {"average": torch.zeros(3)}
    state.begins(sys._getframe())
    found: list[Found] = []
    gone: list[weakref.ref[torch.Tensor]] = []
    for number in range(3):
        moved = [torch.ones(3) * number]
        gone.append(weakref.ref(moved[0]))
        kept["average"] = kept["average"] + 1
        found.append(dict(state.changes(sys._getframe())))
        del moved
        assert gone[-1]() is None
    name = f"{sys._getframe().f_code.co_name}.kept.0"
    assert isinstance(found[2][name], torch.Tensor)


def test_a_model_that_is_compared_anyway_is_left_out_and_its_copy_is_not() -> None:
    def script(look: Callable[[], None]) -> None:
        model = nn.Linear(2, 1)
        look()
        with torch.no_grad():
            model.weight += 1
        look()

    assert "script.model.0" not in looks(script, number=3)[1]
    assert "model.0" in names(looks(script)[1])


def test_what_locals_gave_the_script_stays() -> None:
    def script(look: Callable[[], None]) -> None:
        size = 3
        settings = locals()
        look()
        assert settings["size"] == size

    looks(script)


def test_an_object_that_cannot_be_looked_at_is_passed_over() -> None:
    class Odd:
        def state_dict(self) -> dict[str, Any]:
            return {}

        @property
        def __dict__(self) -> Any:  # type: ignore[override]
            raise RuntimeError("no")

    def script(look: Callable[[], None]) -> None:
        odd, count = Odd(), 0
        look()
        count += 1
        look()
        assert odd is not None

    assert names(looks(script)[1]) == {"count"}
