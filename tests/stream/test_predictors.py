"""Bounded predictors of the shape of sam2's and SAMURAI's against unbounded ones, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from stream.standins import WIDTH, Loader, Predictor
from torchtrim.errors import Unsupported, UsageError
from torchtrim.stream import Evicted, bound_state
from torchtrim.stream.predictors import BoundPredictorState

SHAPES = [
    {"samurai": False, "together": False},
    {"samurai": False, "together": True},
    {"samurai": True, "together": True},
]


def video(frames: int) -> torch.Tensor:
    return torch.randn(frames, WIDTH, generator=torch.Generator().manual_seed(0))


def both(
    predictor: Predictor, run: Any, frames: int = 90, **options: Any
) -> tuple[list[torch.Tensor], list[torch.Tensor], BoundPredictorState]:
    free = predictor.init_state(video(frames))
    tied = predictor.init_state(video(frames))
    bound = bound_state(tied, predictor, **options)
    return list(run(predictor, free)), list(run(predictor, tied)), bound


def forward(predictor: Predictor, state: dict[str, Any]) -> Any:
    predictor.click(state, 0, 0)
    if not predictor.samurai_mode:
        predictor.click(state, 0, 1)
    yield from predictor.propagate(state, list(range(90)))


def turning(predictor: Predictor, state: dict[str, Any]) -> Any:
    predictor.click(state, 40, 0)
    yield from predictor.propagate(state, list(range(40, 90)))
    yield from predictor.propagate(state, list(range(39, 0, -1)), reverse=True)
    yield from predictor.propagate(state, list(range(40, 80)))


def corrected(predictor: Predictor, state: dict[str, Any]) -> Any:
    predictor.click(state, 0, 0)
    yield from predictor.propagate(state, list(range(40)))
    predictor.click(state, 36, 0)
    yield from predictor.propagate(state, list(range(36, 90)))


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    varied = len({tuple(masks.flatten().tolist()) for masks in one}) > len(one) // 2
    pairs = zip(one, other, strict=True)
    return varied and all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("shape", SHAPES)
def test_forward(shape: dict[str, bool]) -> None:
    predictor = Predictor(**shape)
    predictor.bad = {5, 9, *range(20, 55)}
    free, tied, bound = both(predictor, forward)
    assert equal(free, tied)
    size, records = bound.bytes, len(bound.store)
    predictor.bad = set()
    list(predictor.propagate(bound.state, [89]))
    assert records < 200
    assert size <= bound.bytes + 64


@pytest.mark.parametrize("shape", SHAPES[:2])
def test_forward_and_back(shape: dict[str, bool]) -> None:
    free, tied, _ = both(Predictor(**shape), turning)
    assert equal(free, tied)


@pytest.mark.parametrize("shape", SHAPES[:2])
def test_a_click_four_frames_back(shape: dict[str, bool]) -> None:
    free, tied, _ = both(Predictor(**shape), corrected, corrections=4)
    assert equal(free, tied)
    with pytest.raises(Evicted, match="corrections=N"):
        both(Predictor(**shape), corrected)


@pytest.mark.parametrize("shape", SHAPES)
def test_nothing_grows(shape: dict[str, bool]) -> None:
    predictor = Predictor(**shape)
    state = predictor.init_state(video(400))
    bound = bound_state(state, predictor)
    predictor.click(state, 0, 0)
    sizes = []
    for frame, _ in enumerate(predictor.propagate(state, list(range(400)))):
        if frame in (60, 61, 399):
            sizes.append(bound.bytes)
    assert len(set(sizes)) == 1


def test_samurai_finds_its_memory_after_a_long_absence() -> None:
    predictor = Predictor(samurai=True, together=True)
    predictor.bad = set(range(12, 380))

    def run(predictor: Predictor, state: dict[str, Any]) -> Any:
        predictor.click(state, 0, 0)
        yield from predictor.propagate(state, list(range(400)))

    free, tied, bound = both(predictor, run, 400)
    assert equal(free, tied)
    assert len(bound.store) < 400


def test_a_loader_lets_past_images_go_and_reads_them_again() -> None:
    predictor, loader = Predictor(), Loader(60)
    free = predictor.init_state(Loader(60))
    tied = predictor.init_state(loader)
    bound = bound_state(tied, predictor)
    runs = []
    for state in (free, tied):
        predictor.click(state, 0, 0)
        runs.append(list(predictor.propagate(state, list(range(60)))))
    assert equal(*runs)
    assert sum(image is not None for image in loader.images) == 1
    assert loader.images[59] is not None
    assert loader.images[59].dtype is torch.float32
    assert torch.equal(tied["images"][3], free["images"][3].float())
    assert len(tied["images"]) == 60
    bound.release()
    assert tied["images"] is loader


@pytest.mark.parametrize("shape", SHAPES)
def test_released_states_go_on(shape: dict[str, bool]) -> None:
    predictor = Predictor(**shape)
    state, tied = predictor.init_state(video(60)), predictor.init_state(video(60))
    bound = bound_state(tied, predictor)
    runs = []
    for one in (state, tied):
        predictor.click(one, 0, 0)
        runs.append(list(predictor.propagate(one, list(range(14)))))
        if one is tied:
            bound.release()
        runs[-1] += list(predictor.propagate(one, list(range(14, 30))))
    assert equal(*runs)
    assert type(tied["output_dict_per_obj"]) is dict


def test_clearing_and_renumbering_objects() -> None:
    predictor = Predictor()
    state = predictor.init_state(video(60))
    bound = bound_state(state, predictor)
    for obj in (0, 1):
        predictor.click(state, 0, obj)
    list(predictor.propagate(state, list(range(20))))
    for name in ("output_dict_per_obj", "frames_tracked_per_obj"):
        kept = state[name].pop(1)
        state[name].pop(0)
        state[name].update({0: kept})
    list(predictor.propagate(state, list(range(20, 60))))
    assert max(state["frames_tracked_per_obj"][0]) == 59
    for kinds in state["output_dict_per_obj"].values():
        for records in kinds.values():
            records.clear()
    state["frames_tracked_per_obj"][0].clear()
    assert not state["frames_tracked_per_obj"][0]
    state["output_dict_per_obj"].clear()
    assert bound.store.bytes == 0


def test_what_is_not_known_is_refused() -> None:
    predictor = Predictor()
    state = predictor.init_state(video(3))
    bound_state(state, predictor)
    with pytest.raises(UsageError, match="already bound"):
        bound_state(state, predictor)
    other = predictor.init_state(video(3)) | {"memory_bank": {}}
    with pytest.raises(Unsupported, match=r"has \['memory_bank'\] and lacks nothing"):
        bound_state(other, predictor)
    with pytest.raises(Unsupported, match="cannot tell how far back"):
        bound_state(predictor.init_state(video(3)), torch.nn.Linear(1, 1))
    with pytest.raises(Unsupported, match="samurai mode"):
        bound_state(predictor.init_state(video(3)), Predictor(samurai=True))
    state = predictor.init_state(video(3))
    bound_state(state, predictor)
    records = {"cond_frame_outputs": {0: {"depth": 1}}, "non_cond_frame_outputs": {}}
    state["output_dict_per_obj"][0] = records
    state["frames_tracked_per_obj"][0] = {}
    with pytest.raises(Unsupported, match="a field 'depth'"):
        state["frames_tracked_per_obj"][0][0] = {"reverse": False}
