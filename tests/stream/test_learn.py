"""Lifetimes found by watching, and wrong ones rejected by comparing."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from torchtrim.errors import UsageError
from torchtrim.stream import learn_state, pinned, try_lifetimes, volatile, window

OTHER = "output_dict_per_obj.*.non_cond_frame_outputs.*"
PROMPTED = "output_dict_per_obj.*.cond_frame_outputs.*"


class Small:
    """A stream that reads what it says: `near` back three frames, `first` for ever, `mask` never."""

    def __init__(self) -> None:
        self.near: dict[int, torch.Tensor] = {}
        self.first: list[torch.Tensor] = []
        self.records: dict[int, dict[str, Any]] = {}
        self.table = torch.linspace(0, 1, 8)
        self.tables: dict[int, torch.Tensor] = {}

    def step(self, frame: int) -> torch.Tensor:
        image = torch.sin(torch.arange(8.0) * (frame + 1))
        seen = [self.near[one] for one in range(frame - 3, frame) if one in self.near]
        out = torch.stack([image, self.table, *self.first, *seen]).sum(0)
        if frame == 0:
            self.first.append(out * 2)
        self.near[frame] = torch.tanh(out)
        self.records[frame] = {"mask": out + 1, "image": image}
        self.tables[frame] = self.table
        return out


def small(model: Any) -> Iterator[Any]:
    state = Small()
    yield state
    for frame in range(40):
        yield state.step(frame)


def test_a_small_stream_is_learnt() -> None:
    learnt = learn_state(None, small)
    found = {one.pattern: one for one in learnt.fields}
    assert learnt.lifetimes() == {
        "near.*": window(3),
        "first[0]": pinned(),
        "records.*.mask": volatile(),
        "records.*.image": volatile(),
        "table": pinned(),
        "tables.*": found["tables.*"].lifetime,
    }
    assert str(found["tables.*"].lifetime) == "persistent"
    assert found["records.*.mask"].oldest_read is None
    assert found["records.*.image"].oldest_read == 0
    assert learnt.trial is not None
    assert learnt.trial.accepted
    assert learnt.trial.bytes < learnt.trial.unbounded_bytes / 5
    assert "accepted: results identical bit for bit" in str(learnt)


@pytest.mark.parametrize(("pattern", "frames"), [("near.*", 2), ("first[0]", 5), ("near.*", 0)])
def test_what_is_cut_too_short_is_rejected(pattern: str, frames: int) -> None:
    trial = try_lifetimes(None, small, {pattern: window(frames)})
    assert not trial.accepted
    assert trial.differs_from is not None
    assert trial.differs_from <= 16
    assert "rejected" in str(trial)


def test_streams_that_prove_nothing() -> None:
    def still(model: Any) -> Iterator[Any]:
        state = {"x": torch.zeros(2)}
        yield state
        for _ in range(40):
            yield torch.zeros(2)

    trial = try_lifetimes(None, still, {"x": volatile()})
    assert (trial.accepted, trial.varies) == (False, False)
    assert "undecided" in str(trial)

    def random(model: Any) -> Iterator[Any]:
        yield {}
        for _ in range(40):
            yield torch.rand(3)

    with pytest.raises(UsageError, match="two unbounded runs"):
        try_lifetimes(None, random, {})


def test_runs_that_are_none() -> None:
    with pytest.raises(UsageError, match="must first yield"):
        learn_state(None, lambda model: iter([torch.zeros(1)]))
    with pytest.raises(UsageError, match="ended after 40 of 41"):
        learn_state(None, small, 41)
    with pytest.raises(UsageError, match="at least 8 frames"):
        learn_state(None, small, 3)


@pytest.fixture(scope="module")
def sam2() -> Any:
    pytest.importorskip("transformers")
    from stream import tiny

    return tiny.tracker()


def track(model: Any) -> Iterator[Any]:
    from stream import tiny

    session = tiny.session(model)
    tiny.prompt(session, 0)
    yield session
    for frame in range(40):
        yield model(session, frame=tiny.image(frame), frame_idx=frame).pred_masks


@functools.cache
def learnt_of(model: Any) -> Any:
    return learn_state(model, track)


def test_the_live_set_of_sam2_is_found(sam2: Any) -> None:
    learnt = learnt_of(sam2)
    lifetimes = learnt.lifetimes()
    assert lifetimes[f"{OTHER}.object_pointer"] == window(15)
    assert lifetimes[f"{OTHER}.maskmem_features"] == window(6)
    for name in ("high_res_masks", "pred_masks", "object_score_logits"):
        assert lifetimes[f"{OTHER}.{name}"] == volatile()
    assert lifetimes[f"{PROMPTED}.object_pointer"] == pinned()
    assert lifetimes[f"{PROMPTED}.maskmem_features"] == pinned()
    assert lifetimes["processed_frames.*"] == volatile()
    whys = {one.pattern: one.why for one in learnt.fields}
    for level in (0, 1):
        name = f"cache._vision_features.*.vision_pos_embeds[{level}]"
        assert whys[name] == "no operator read it"
    assert learnt.trial.accepted, str(learnt)
    assert learnt.trial.bytes < learnt.trial.unbounded_bytes / 5


@pytest.mark.parametrize(("frames", "accepted"), [(7, False), (8, False), (14, False), (15, True)])
def test_windows_of_whole_records(sam2: Any, frames: int, accepted: bool) -> None:
    trial = try_lifetimes(sam2, track, {OTHER: window(frames)}, 20 if not accepted else 40)
    assert trial.accepted is accepted, str(trial)
    if not accepted:
        assert trial.differs_from == frames + 2 <= 16
        assert trial.difference > 0
