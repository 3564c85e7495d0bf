"""What grows is told from what only fills, or falls now and then."""

from __future__ import annotations

import pytest

from torchtrim.stream.growth import (
    SizeSample,
    adapter_for,
    keeps_growing,
    looks_at,
    per_frame,
    settled,
)


def sampled(size: object, frames: int = 60) -> list[SizeSample]:
    looks = [frame for frame in range(1, frames + 1) if looks_at(frame) or frame == frames]
    return list(settled([SizeSample(frame, size(frame)) for frame in looks]))  # type: ignore[operator]


@pytest.mark.parametrize(
    ("size", "grows"),
    [
        (lambda frame: 100 * frame, True),
        (lambda frame: 7 + frame // 10, True),
        (lambda frame: frame * frame, True),
        (lambda frame: 42, False),
        (lambda frame: min(frame, 15), False),
        (lambda frame: min(frame, 30), False),
        (lambda frame: 100 - frame, False),
        (lambda frame: frame % 7, False),
        (lambda frame: 10 if frame > 5 else 0, False),
    ],
)
@pytest.mark.parametrize("frames", [60, 100, 400])
def test_growth(size: object, grows: bool, frames: int) -> None:
    assert keeps_growing(sampled(size, frames)) is grows


def test_what_a_frame_adds_is_exact_for_a_line() -> None:
    assert per_frame(sampled(lambda frame: 5 + 1024 * frame)) == 1024
    assert per_frame([]) == per_frame([SizeSample(3, 7)]) == 0


@pytest.mark.parametrize("frames", [10, 60, 500, 20_000])
def test_looks_are_few_and_the_later_part_has_enough(frames: int) -> None:
    looks = [frame for frame in range(1, frames + 1) if looks_at(frame)]
    assert len(looks) <= 36
    assert len(sampled(lambda frame: frame, frames)) >= 3


def test_too_few_samples_tell_nothing() -> None:
    assert not keeps_growing([SizeSample(2, 1), SizeSample(4, 2)])
    assert settled([]) == []


@pytest.mark.parametrize(
    ("name", "classes", "adapter"),
    [
        ("s.output_dict_per_obj[0]", ("dict", "Sam2VideoInferenceSession"), "bound_session"),
        ("s.output_dict_per_obj[0]", ("Records", "Objects", "Sam2VideoInferenceSession"), ""),
        ("state['output_dict']['non_cond_frame_outputs']", ("dict", "dict"), "bound_state"),
        ("cache.layers[0].keys", ("Tensor", "DynamicLayer", "DynamicCache"), "sink_cache"),
        ("model.memory", ("dict", "Model"), ""),
    ],
)
def test_the_adapter_that_bounds_it(name: str, classes: tuple[str, ...], adapter: str) -> None:
    assert adapter_for(name, classes) == adapter
