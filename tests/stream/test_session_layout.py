"""The adapter for sessions on a stand-in of their layout: runs where transformers is not installed."""

from __future__ import annotations

import pytest
import torch

from stream.standins import SIDE, WIDTH, Sam2VideoInferenceSession, Tracker
from torchtrim.errors import Unsupported
from torchtrim.stream import Evicted, bound_session


def run(bound: bool, frames: int = 60) -> tuple[list[torch.Tensor], Sam2VideoInferenceSession]:
    session, model = Sam2VideoInferenceSession(), Tracker()
    if bound:
        bound_session(session, model, trust_version=True)
    made = torch.Generator().manual_seed(0)
    images = torch.randn(frames, WIDTH, generator=made)
    return [model(session, frame=image).pred_masks for image in images], session


def test_masks_are_equal_and_little_is_left() -> None:
    free, _ = run(False)
    tied, session = run(True)
    assert all(torch.equal(one, other) for one, other in zip(free, tied, strict=True))
    assert len({tuple(masks.flatten().tolist()) for masks in free}) == len(free)
    past = session.output_dict_per_obj[0]["non_cond_frame_outputs"]
    assert sorted(past) == list(range(44, 60))
    assert [set(past[frame]) for frame in (44, 59)] == [
        {"object_pointer"},
        {"object_pointer", "maskmem_features", "maskmem_pos_enc"},
    ]
    assert dict.__len__(session.processed_frames) == 0
    assert len(session.processed_frames) == 60
    assert session.cache._vision_features[59]["vision_pos_embeds"][0].numel() == 0
    assert len(session.frames_tracked_per_obj[0]) == 60
    assert session.frames_tracked_per_obj[0][7] == {"reverse": False}
    with pytest.raises(Evicted, match="window"):
        past.get(10)
    assert past.get(99) is None
    with pytest.raises(Evicted, match="volatile"):
        past[59]["pred_masks"]
    assert SIDE


def test_another_version_is_refused() -> None:
    with pytest.raises(Unsupported, match="trust_version=True"):
        bound_session(Sam2VideoInferenceSession(), Tracker())
