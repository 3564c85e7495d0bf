"""Bounded tracking sessions of transformers against unbounded ones, bit for bit."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch

from torchtrim.errors import Unsupported, UsageError
from torchtrim.stream import Evicted, FileSpill, SpillFailed, bound_session
from torchtrim.stream.sessions import BoundSession

pytest.importorskip("transformers")

from stream import tiny

Outputs = list[torch.Tensor]


@functools.cache
def unbounded(model: Any) -> Outputs:
    return forward(model, lambda session, model: None)


Bind = Callable[[Any, Any], BoundSession | None]


tracker = functools.cache(tiny.tracker)


@pytest.fixture(scope="module")
def sam2() -> Any:
    return tracker("Sam2Video")


def forward(model: Any, bind: Bind) -> Outputs:
    session = tiny.session(model)
    bind(session, model)
    tiny.prompt(session, 0)
    return [model(session, frame=tiny.image(frame)).pred_masks for frame in range(34)]


def backward(model: Any, bind: Bind) -> Outputs:
    session = tiny.session(model)
    bind(session, model)
    tiny.prompt(session, 40)
    return [
        model(session, frame=tiny.image(frame), frame_idx=frame, reverse=frame < 40).pred_masks
        for frame in range(40, 0, -1)
    ]


def several_objects(model: Any, bind: Bind) -> Outputs:
    session = tiny.session(model)
    bind(session, model)
    tiny.prompt(session, 0, 1)
    tiny.prompt(session, 0, 2, (40, 12))
    out = []
    for frame in range(32):
        if frame == 12:
            tiny.prompt(session, frame, 7, (50, 50))
        out.append(model(session, frame=tiny.image(frame)).pred_masks)
    return out


def corrected(model: Any, bind: Bind) -> Outputs:
    session = tiny.session(model)
    bind(session, model)
    tiny.prompt(session, 0)
    out = [model(session, frame=tiny.image(frame)).pred_masks for frame in range(30)]
    for frame, at in ((24, (10, 50)), (29, (30, 30)), (24, (12, 48))):
        tiny.prompt(session, frame, 1, at)
        out.append(model(session, frame_idx=frame).pred_masks)
    return out + [model(session, frame=tiny.image(frame)).pred_masks for frame in range(30, 50)]


def lost_and_found(model: Any, bind: Bind) -> Outputs:
    session, frame = tiny.session(model), 0
    bind(session, model)
    tiny.prompt(session, 0)

    def lose(module: Any, args: Any, score: torch.Tensor) -> torch.Tensor:
        return score - 100 if 8 <= frame < 34 else score

    hook = model.mask_decoder.pred_obj_score_head.register_forward_hook(lose)
    out = []
    for frame in range(50):
        out.append(model(session, frame=tiny.image(frame)).pred_masks)
    hook.remove()
    assert all(float(masks.max()) == -1024 for masks in out[8:34])
    return out[:8] + out[34:]


def interleaved(model: Any, bind: Bind) -> Outputs:
    streams = [tiny.session(model), tiny.session(model)]
    for number, session in enumerate(streams):
        bind(session, model)
        tiny.prompt(session, 0, 1, (20 + 20 * number, 30))
    out = []
    for frame in range(20):
        for number, session in enumerate(streams):
            for _ in range(1 + number * (frame % 2)):
                seen = len(session.processed_frames or ())
                out.append(model(session, frame=tiny.image(seen, number)).pred_masks)
    return out


def both_ways(model: Any, bind: Bind) -> Outputs:
    session = tiny.session(model, torch.cat([tiny.image(frame) for frame in range(40)]))
    bind(session, model)
    tiny.prompt(session, 20)
    out = [model(session, frame_idx=20).pred_masks]
    for reverse in (False, True):
        tracked = model.propagate_in_video_iterator(session, start_frame_idx=20, reverse=reverse)
        out += [one.pred_masks for one in tracked]
    return out


def skipped_and_disordered(model: Any, bind: Bind) -> Outputs:
    session = tiny.session(model)
    bind(session, model)
    tiny.prompt(session, 0)
    order = [0, 1, 2, 5, 4, 3, 9, 8, 20, 21, 22, 40, 39, 41, 43, 45, 47, 46, 44, 60]
    return [model(session, frame=tiny.image(frame), frame_idx=frame).pred_masks for frame in order]


def reset_in_the_middle(model: Any, bind: Bind) -> Outputs:
    session = tiny.session(model)
    bind(session, model)
    tiny.prompt(session, 0)
    out = [model(session, frame=tiny.image(frame)).pred_masks for frame in range(20)]
    session.reset_inference_session()
    tiny.prompt(session, 20, 5, (44, 44))
    return out + [model(session, frame=tiny.image(frame)).pred_masks for frame in range(20, 42)]


RUNS = [
    forward,
    backward,
    several_objects,
    corrected,
    lost_and_found,
    interleaved,
    both_ways,
    skipped_and_disordered,
    reset_in_the_middle,
]


CASES = [
    *(("Sam2Video", run) for run in RUNS),
    *(("Sam3TrackerVideo", run) for run in (forward, both_ways)),
    *(("EdgeTamVideo", run) for run in (forward, interleaved)),
]


@pytest.mark.parametrize(("family", "run"), CASES)
def test_bounded_is_unbounded_to_the_bit(family: str, run: Callable[..., Outputs]) -> None:
    model = tracker(family)
    corrections = 6 if run in (corrected, skipped_and_disordered) else 0
    bounds: list[BoundSession] = []

    def bind(session: Any, model: Any) -> BoundSession:
        bounds.append(bound_session(session, model, corrections=corrections))
        return bounds[-1]

    expected = run(model, lambda session, model: None)
    got = run(model, bind)
    assert tiny.vary(expected)
    assert [*map(tiny.digest, got)] == [*map(tiny.digest, expected)]
    assert [one.missed for one in bounds] == [0] * len(bounds)


def grown(model: Any, objects: int, frames: tuple[int, ...]) -> tuple[list[int], list[int]]:
    session = tiny.session(model)
    bound = bound_session(session, model)
    for number in range(objects):
        tiny.prompt(session, 0, number, (8 + 9 * number, 30))
    sizes, records = [], []
    for frame in range(frames[-1] + 1):
        model(session, frame=tiny.image(frame % 5))
        if frame in frames:
            sizes.append(bound.bytes)
            records.append(bound.store.bookkeeping + len(bound.store))
    return sizes, records


@pytest.mark.parametrize("objects", [1, 3])
def test_nothing_grows(sam2: Any, objects: int) -> None:
    sizes, records = grown(sam2, objects, (24, 25, 50))
    assert len(set(sizes)) == 1
    assert records[0] <= records[1] <= records[0] + 300


def test_fewer_frames_than_are_read_change_the_masks_and_say_so(sam2: Any) -> None:
    expected = unbounded(sam2)
    for keep in (3, 7, 14):
        made: list[BoundSession] = []

        def bind(
            session: Any, model: Any, keep: int = keep, made: list[BoundSession] = made
        ) -> BoundSession:
            made.append(bound_session(session, model, keep=keep))
            return made[0]

        got = forward(sam2, bind)
        first = next(
            number
            for number, (one, other) in enumerate(zip(got, expected, strict=True))
            if not torch.equal(one, other)
        )
        assert first == made[0].first_missed == keep + 2
        assert made[0].missed > 0
    for keep in (15,):
        got = forward(
            sam2, lambda session, model, keep=keep: bound_session(session, model, keep=keep)
        )
        assert [*map(tiny.digest, got)] == [*map(tiny.digest, expected)]


def test_going_further_back_than_agreed_says_what_is_gone(sam2: Any) -> None:
    session = tiny.session(sam2)
    bound_session(session, sam2)
    tiny.prompt(session, 0)
    for frame in range(30):
        sam2(session, frame=tiny.image(frame))
    tiny.prompt(session, 20, 1, (9, 9))
    with pytest.raises(Evicted, match=r"'image' of frame 20 was evicted.*Pass the image again"):
        sam2(session, frame_idx=20)
    with pytest.raises(Evicted, match="corrections=N"):
        sam2(session, frame=tiny.image(20), frame_idx=20)
    with pytest.raises(Evicted, match="high_res_masks"):
        session.output_dict_per_obj[0]["non_cond_frame_outputs"][29]["high_res_masks"]
    with pytest.raises(KeyError):
        session.processed_frames[400]


def test_a_failed_frame_can_be_given_again(sam2: Any) -> None:
    session, expected = tiny.session(sam2), unbounded(sam2)
    bound_session(session, sam2)
    tiny.prompt(session, 0)
    got = []
    for frame in range(34):
        if frame == 25:
            hook = sam2.mask_decoder.register_forward_pre_hook(lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                sam2(session, frame=tiny.image(frame), frame_idx=frame)
            hook.remove()
        got.append(sam2(session, frame=tiny.image(frame), frame_idx=frame).pred_masks)
    assert [*map(tiny.digest, got)] == [*map(tiny.digest, expected)]


def test_spilled_state_returns_and_masks_are_equal(sam2: Any, tmp_path: Any) -> None:
    expected = unbounded(sam2)
    made: list[BoundSession] = []

    def bind(session: Any, model: Any) -> BoundSession:
        made.append(bound_session(session, model, budget=30_000, spill=FileSpill(tmp_path)))
        return made[0]

    got = forward(sam2, bind)
    assert [*map(tiny.digest, got)] == [*map(tiny.digest, expected)]
    assert made[0].store.bytes <= 30_000 < made[0].store.bytes + made[0].store.spilled_bytes


def test_a_full_disk_is_an_error_and_the_state_is_whole(sam2: Any, tmp_path: Any) -> None:
    session = tiny.session(sam2)
    bound_session(session, sam2, budget=30_000, spill=FileSpill(tmp_path, most_bytes=100))
    tiny.prompt(session, 0)
    got, failed = [], 0
    for frame in range(34):
        try:
            sam2(session, frame=tiny.image(frame), frame_idx=frame)
        except SpillFailed:
            failed += 1
        records = session.output_dict_per_obj[0]
        got.append(frame in records["non_cond_frame_outputs"] or frame == 0)
    assert failed > 0
    assert all(got)


def test_released_sessions_go_on(sam2: Any) -> None:
    expected = unbounded(sam2)
    session = tiny.session(sam2)
    bound = bound_session(session, sam2)
    tiny.prompt(session, 0)
    got = [sam2(session, frame=tiny.image(frame)).pred_masks for frame in range(20)]
    bound.release()
    assert type(session.output_dict_per_obj[0]["non_cond_frame_outputs"][19]) is dict
    got += [sam2(session, frame=tiny.image(frame)).pred_masks for frame in range(20, 34)]
    assert [*map(tiny.digest, got)] == [*map(tiny.digest, expected)]
    assert len(session.output_dict_per_obj[0]["non_cond_frame_outputs"]) == 30


def test_a_session_that_is_gone_leaves_no_hook(sam2: Any) -> None:
    before = len(sam2._forward_hooks)
    session = tiny.session(sam2)
    bound_session(session, sam2)
    assert len(sam2._forward_hooks) == before + 1
    del session
    gc.collect()
    assert len(sam2._forward_hooks) <= before


def test_what_is_not_known_is_refused(sam2: Any) -> None:
    with pytest.raises(Unsupported, match="cannot bound a object"):
        bound_session(object(), sam2)
    session = tiny.session(sam2)
    bound_session(session, sam2)
    with pytest.raises(UsageError, match="already bound"):
        bound_session(session, sam2)
    other = tiny.session(sam2)
    other.memory_bank = {}
    with pytest.raises(Unsupported, match=r"has \['memory_bank'\] and lacks nothing"):
        bound_session(other, sam2)
    with pytest.raises(Unsupported, match="config has no num_maskmem"):
        bound_session(tiny.session(sam2), torch.nn.Linear(1, 1))
