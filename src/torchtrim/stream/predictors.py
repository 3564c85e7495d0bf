"""Bound the inference state of video predictors of the `sam2` package and of SAMURAI.

Based on `sam2_base.py` and `sam2_video_predictor.py` of facebookresearch/sam2 at 2b90b9f, which tracks each
object separately, and of yangchris11/samurai at 76ba195, which tracks all objects together and stores each
result in two dicts. SAMURAI reads the scores of past frames, newest first, until enough of them are good.
The newest good frames are its memory, whatever their age.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from torchtrim.errors import Unsupported, UsageError
from torchtrim.stream.lifetimes import Lifetime, pinned, volatile, window
from torchtrim.stream.records import (
    CONDITIONING,
    OTHER,
    Bounding,
    Objects,
    Record,
    Records,
    Tracked,
    TrackedObjects,
    wrapped,
)
from torchtrim.stream.storages import state_bytes
from torchtrim.stream.store import StateStore
from torchtrim.stream.tombstones import LoadedFrames

_COMMON = {
    *("images", "num_frames", "offload_video_to_cpu", "offload_state_to_cpu", "video_height"),
    *("video_width", "device", "storage_device", "point_inputs_per_obj", "mask_inputs_per_obj"),
    *("cached_features", "constants", "obj_id_to_idx", "obj_idx_to_id", "obj_ids"),
    *("output_dict_per_obj", "temp_output_dict_per_obj"),
}
_LAYOUTS = {
    "each object": _COMMON | {"frames_tracked_per_obj"},
    "all objects": _COMMON
    | {"output_dict", "consolidated_frame_inds", "tracking_has_started", "frames_already_tracked"},
}
_MEMORY = ("maskmem_features", "maskmem_pos_enc")
_SCORES = ("best_iou_score", "kf_score", "object_score_logits")
_FIELDS = (*_MEMORY, "obj_ptr", "pred_masks", *_SCORES)


class BoundPredictorState(Bounding):
    """A predictor's `inference_state`, bounded by `bound_state` and restored by `release()`."""

    pointer = "obj_ptr"
    live = _FIELDS

    def __init__(
        self,
        state: dict[str, Any],
        predictor: Any,
        store: StateStore,
        corrections: int,
        *,
        turns: bool,
    ) -> None:
        super().__init__(store, turns=turns, strict=True)
        self.state = state
        self._corrections = corrections
        self._good = _GoodFrames(predictor, self.store) if _is_samurai(predictor) else None
        self._whole: dict[str, Records] = {}
        if hasattr(state["images"], "images"):
            state["images"] = LoadedFrames(state["images"])
        state["output_dict_per_obj"] = Objects(state["output_dict_per_obj"], self)
        if "output_dict" in state:
            self._whole = state["output_dict"] = wrapped(state["output_dict"], self, "all")
            tracked = state["frames_already_tracked"]
            state["frames_already_tracked"] = Tracked(tracked, self)
        else:
            tracked = state["frames_tracked_per_obj"]
            state["frames_tracked_per_obj"] = TrackedObjects(tracked, self)

    @property
    def bytes(self) -> int:
        """Bytes of all storages that the state keeps alive, including images, each counted once."""
        return state_bytes(self.state)

    def release(self) -> None:
        """Remove the bounds: remaining entries move to plain dicts, which grow again."""
        for key in list(self.store):
            self.store.recall(key)
        state = self.state
        state["output_dict_per_obj"] = state["output_dict_per_obj"].plain()
        if self._whole:
            state["output_dict"] = {kind: one.plain() for kind, one in self._whole.items()}
            state["frames_already_tracked"] = dict(state["frames_already_tracked"])
        else:
            state["frames_tracked_per_obj"] = state["frames_tracked_per_obj"].plain()
        if isinstance(state["images"], LoadedFrames):
            state["images"] = state["images"].source

    def tracked(self, frames: Tracked, frame: int) -> None:
        """See `Bounding`. The frame ends after its last object."""
        each = self.state.get("frames_tracked_per_obj")
        if each is None or each[max(each)] is frames:
            self.end_frame(frame)

    def objects(self) -> Iterator[Mapping[str, Records]]:
        """See `Bounding`."""
        yield from self.state["output_dict_per_obj"].values()
        if self._whole:
            yield self._whole

    def absent(self, records: Records, frame: int, *, must: bool) -> Any:
        """See `Bounding`. An evicted frame that SAMURAI's scan would skip reads as a bad frame."""
        if must and self._good is not None and self._good.was_bad(records, frame):
            return self._good.bad
        return super().absent(records, frame, must=must)

    def lacks(self, record: Record, field: str) -> Any:
        """See `Bounding`. The scores of such a frame read as the lowest possible."""
        good = self._good
        if good is not None and field in good.bad and good.was_bad(record.records, record.frame):
            return good.bad[field]
        return super().lacks(record, field)

    def before_end(self, frame: int, touched: list[tuple[Records, int]]) -> None:
        """See `Bounding`."""
        if self._good is not None:
            for records, written in touched:
                if records is self._whole.get(OTHER):
                    self._good.judge(records, written)
            for records in self.tables():
                self._good.retire(records, frame)
        images = self.state["images"]
        if isinstance(images, LoadedFrames):
            images.drop(lambda one: abs(one - frame), self._corrections)


class _GoodFrames:
    """The frames that SAMURAI's own scan would select as memory."""

    def __init__(self, predictor: Any, store: StateStore) -> None:
        self._limits = (
            float(predictor.memory_bank_iou_threshold),
            float(predictor.memory_bank_obj_score_threshold),
            float(predictor.memory_bank_kf_score_threshold),
        )
        self._memories = int(predictor.num_maskmem)
        self._store = store
        self._good: deque[int] = deque()
        self._forgot = False
        self._scores = int(predictor.max_obj_ptrs_in_encoder)
        worst = torch.tensor(float("-inf"))
        self.bad = {"best_iou_score": worst, "object_score_logits": worst}

    def judge(self, records: Records, frame: int) -> None:
        """Record whether a tracked frame is good, by its scores."""
        record = records[frame]
        if record.get("best_iou_score") is None:
            return
        values = [record["best_iou_score"], record["object_score_logits"], record.get("kf_score")]
        scores = zip(values, self._limits, strict=True)
        if frame in self._good:
            self._good.remove(frame)
        if all(value is None or float(value) > limit for value, limit in scores):
            self._good.append(frame)

    def was_bad(self, records: Records, frame: int) -> bool:
        """True if the frame was evicted and the scan would skip it."""
        key = (f"{OTHER}.best_iou_score", (*records.series, frame))
        evicted = self._store.tombstone(key) is not None
        return evicted and (not self._forgot or frame > self._good[0])

    def retire(self, records: Records, now: int) -> None:
        """Evict everything that neither the newest good frames nor the last two frames need."""
        while len(self._good) > self._scores:
            self._good.popleft()
            self._forgot = True
        scores = set(self._good)
        memories = {*list(self._good)[-self._memories :], now, now - 1}
        for fields, wanted, near in ((_MEMORY, memories, 1), (_SCORES, scores, self._scores)):
            for frame in [f for f in records if f not in wanted and abs(f - now) > near]:
                for field in fields:
                    key = records.key(frame, field)
                    self._store.evict(key, "newer frames have replaced it as memory")


def bound_state(
    state: dict[str, Any],
    predictor: nn.Module,
    *,
    corrections: int = 0,
    turns: bool = True,
    **options: Any,
) -> BoundPredictorState:
    """Bound the `inference_state` of a video predictor of the `sam2` package or of SAMURAI.

    `state` is the return value of `predictor.init_state`. During `propagate_in_video`, entries that no
    later frame reads are evicted after each frame; masks are identical bit for bit. `corrections=N` keeps
    what clicks up to N frames back need; `turns` keeps what propagating again from a prompt needs, in
    either direction. Images in a single tensor stay; a loader's images are evicted and read again on
    demand. Reading an evicted entry raises `Evicted`. `options` are those of `StateStore`.

    Tested with facebookresearch/sam2 at 2b90b9f and yangchris11/samurai at 76ba195. Raises `Unsupported`
    for a state of another layout and `UsageError` for a state that is already bound.
    """
    if isinstance(state.get("output_dict_per_obj"), Objects):
        raise UsageError("this state is already bound; call release() before binding it again.")
    if set(state) not in _LAYOUTS.values():
        nearest = min(_LAYOUTS.values(), key=lambda known: len(known ^ set(state)))
        raise Unsupported(
            "the layout of this inference state differs from sam2 2b90b9f and samurai 76ba195: it "
            f"has {sorted(set(state) - nearest) or 'nothing more'} and lacks "
            f"{sorted(nearest - set(state)) or 'nothing'}. Nothing was changed."
        )
    samurai = _is_samurai(predictor)
    if samurai and "output_dict" not in state:
        raise Unsupported(
            "a predictor in samurai mode needs a state with `output_dict`; this one stores each object "
            "separately. Nothing was changed."
        )
    pointers, memories = _reach(predictor)
    fields = _fields(pointers + corrections, memories + corrections, corrections, samurai)
    store = StateStore(fields, **options)
    return BoundPredictorState(state, predictor, store, corrections, turns=turns)


def _reach(predictor: Any) -> tuple[int, int]:
    try:
        stride = int(predictor.memory_temporal_stride_for_eval)
        memories = 1 + stride * (int(predictor.num_maskmem) - 2)
        return int(predictor.max_obj_ptrs_in_encoder) - 1, max(memories, 0)
    except AttributeError as error:
        raise Unsupported(
            f"cannot tell how far back the predictor reads: {error}. Pass the video predictor that created "
            "this state."
        ) from error


def _fields(pointers: int, memories: int, corrections: int, samurai: bool) -> dict[str, Lifetime]:
    fields = {f"{CONDITIONING}.{name}": pinned() for name in _FIELDS}
    masks = window(corrections)
    kept = {name: window(memories) for name in _MEMORY} | {"obj_ptr": window(pointers)}
    scores = {name: volatile() for name in _SCORES}
    if samurai:
        kept |= {name: pinned() for name in _MEMORY}
        scores = {name: pinned() for name in _SCORES}
    return fields | {
        f"{OTHER}.{n}": one for n, one in (kept | scores | {"pred_masks": masks}).items()
    }


def _is_samurai(predictor: Any) -> bool:
    return bool(getattr(predictor, "samurai_mode", False))
