"""Objects that come and go while a tracker runs: masks of the unbounded run, and nothing left of them."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import draws
from stream.standins import Predictor
from stream.test_predictors import video
from torchtrim.stream import Evicted, HostSpill, bound_state
from torchtrim.stream.predictors import BoundPredictorState

FRAMES = 60
Step = tuple[Any, ...]


def steps(number: int) -> list[Step]:
    """A random sequence of what a tracker's user does, each thing possible when its turn comes."""
    chance = random.Random(number)
    objects, done = 0, 0
    found: list[Step] = []
    for _ in range(chance.randrange(3, 12)):
        what = chance.choice(
            ("add", "add", "click", "remove", "remove", "reset", "on", "on", "back")
        )
        if what == "add" or not objects:
            found.append(("click", done, objects))
            objects += 1
        elif what == "click":
            found.append(("click", max(0, done - chance.randrange(4)), chance.randrange(objects)))
        elif what == "remove":
            found.append(("remove", chance.randrange(objects)))
            objects -= 1
        elif what == "reset":
            found.append(("reset",))
            objects = 0
        elif what == "on":
            end = min(FRAMES, done + chance.randrange(1, 25))
            found.append(("propagate", list(range(done, end)), False))
            done = min(end, FRAMES - 1)
        else:
            found.append(
                ("propagate", list(range(done, max(0, done - chance.randrange(1, 20)), -1)), True)
            )
    return found


def run(
    state: dict[str, Any], sequence: list[Step], *, refusing: bool = False
) -> list[torch.Tensor]:
    """The masks; where the state may refuse to go back so far, those until then."""
    predictor = Predictor()
    masks: list[torch.Tensor] = []
    try:
        for what, *given in sequence:
            if what == "propagate":
                masks.extend(predictor.propagate(state, given[0], given[1]))
            else:
                getattr(predictor, what)(state, *given)
    except Evicted:
        assert refusing
    return masks


def held(bound: BoundPredictorState) -> int:
    return bound.bytes + bound.store.spilled_bytes


@pytest.mark.parametrize("block", range(4))
def test_any_sequence_gives_the_masks_of_the_unbounded_state(block: int) -> None:
    for number in draws.some(range(250 * block, 250 * (block + 1))):
        sequence = steps(number)
        predictor, spill = Predictor(), (None, HostSpill())[number % 2]
        free, tied = predictor.init_state(video(FRAMES)), predictor.init_state(video(FRAMES))
        budget = {"spill": spill, "budget": 200} if spill else {}
        few = number % 3 == 0
        bound = bound_state(tied, predictor, corrections=4 if few else FRAMES, **budget)
        want, got = run(free, sequence), run(tied, sequence, refusing=few)
        assert few or len(want) == len(got)
        assert all(torch.equal(a, b) for a, b in zip(want, got, strict=False)), (number, sequence)
        series = {records.series for kinds in bound.objects() for records in kinds.values()}
        assert {key[1][:-1] for key in bound.store} <= series


def test_a_frame_that_is_prompted_again_keeps_its_place() -> None:
    again = [("click", 0, 0), ("propagate", [0, 1, 2], False), ("click", 3, 0), ("click", 0, 0)]
    free, tied = (Predictor().init_state(video(FRAMES)) for _ in range(2))
    bound_state(tied, Predictor(), corrections=FRAMES)
    sequence = [*again, ("propagate", list(range(3, 10)), False)]
    masks = zip(run(free, sequence), run(tied, sequence), strict=True)
    assert all(torch.equal(one, other) for one, other in masks)


@pytest.mark.parametrize("gone", [0, 1, 2])
def test_after_any_object_went_frames_end_and_nothing_grows(gone: int) -> None:
    predictor = Predictor()
    state = predictor.init_state(video(400))
    bound = bound_state(state, predictor)
    for obj in range(3):
        predictor.click(state, 0, obj)
    list(predictor.propagate(state, list(range(30))))
    predictor.remove(state, gone)
    sizes = []
    for frame, _ in enumerate(predictor.propagate(state, list(range(30, 400))), start=30):
        if frame in (60, 200, 399):
            sizes.append((bound.bytes, len(bound.store), bound.store.now))
    assert [size[:2] for size in sizes] == [sizes[0][:2]] * 3
    assert [size[2] for size in sizes] == [60, 200, 399]


def test_thousands_of_objects_over_time_leave_nothing_behind() -> None:
    predictor = Predictor()
    state = predictor.init_state(video(8))
    bound = bound_state(state, predictor)
    predictor.click(state, 0, 0)
    sizes = set()
    for _ in range(draws.count(3000)):
        predictor.click(state, 3, 1)
        list(predictor.propagate(state, [3, 4, 5]))
        predictor.remove(state, 1)
        list(predictor.propagate(state, [0]))
        sizes.add((held(bound), len(bound.store), bound.store.bookkeeping))
    assert len(sizes) == 1
    assert not bound._touched


def test_a_removed_objects_memory_goes_at_once_and_its_anchors_with_the_next_frame() -> None:
    predictor = Predictor()
    state = predictor.init_state(video(90))
    bound = bound_state(state, predictor)
    predictor.click(state, 0, 0)
    predictor.click(state, 20, 1)
    list(predictor.propagate(state, list(range(30))))
    alone = {key for key in bound.store if key[1][0] == "object 1"}
    assert alone
    before = bound.store.bytes
    predictor.remove(state, 1)
    assert not alone & set(bound.store)
    assert bound.store.bytes < before
    list(predictor.propagate(state, list(range(30, 90))))
    assert not [key for key in bound.store if 15 < key[1][-1] < 36 and key[0].startswith("non")]


def test_what_a_removed_object_had_is_told_and_one_that_comes_back_is_bounded_again() -> None:
    predictor = Predictor()
    state = predictor.init_state(video(200))
    bound = bound_state(state, predictor)
    for obj in range(2):
        predictor.click(state, 0, obj)
    list(predictor.propagate(state, list(range(5))))
    kinds = state["output_dict_per_obj"].pop(1)
    tracked = state["frames_tracked_per_obj"].pop(1)
    list(predictor.propagate(state, [5]))
    with pytest.raises(Evicted, match="its object was removed"):
        kinds["cond_frame_outputs"][0]["maskmem_features"]
    kinds["cond_frame_outputs"].clear()
    state["output_dict_per_obj"][1] = kinds
    state["frames_tracked_per_obj"] |= {1: tracked}
    predictor.click(state, 6, 1)
    sizes = []
    for frame, _ in enumerate(predictor.propagate(state, list(range(6, 200))), start=6):
        if frame in (60, 199):
            sizes.append(bound.bytes)
    assert sizes[0] == sizes[1]


def test_what_is_pinned_is_spilled_and_comes_back() -> None:
    predictor = Predictor()
    free, tied = predictor.init_state(video(90)), predictor.init_state(video(90))
    bound = bound_state(tied, predictor, budget=64, spill=HostSpill())
    runs = []
    for state in (free, tied):
        masks = []
        for frame in range(0, 90, 6):
            predictor.click(state, frame, 0)
            masks += list(predictor.propagate(state, list(range(frame, frame + 6))))
        runs.append(masks)
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
    assert bound.store.bytes <= 64
    assert bound.store.spilled_bytes > 15 * 6 * 2
