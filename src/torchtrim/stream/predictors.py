"""Predictors of the `sam2` package and of SAMURAI in bounded memory, by the state that they hand out.

Read in `sam2_base.py` and `sam2_video_predictor.py` of facebookresearch/sam2 at 2b90b9f, where each object
is tracked on its own, and of yangchris11/samurai at 76ba195, where all objects are tracked at once and each
result is in two dicts. SAMURAI reads the scores of past frames from the newest back until enough of them
were good; of the good ones the newest are its memory, however old.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from torchtrim.errors import Unsupported, UsageError
from torchtrim.stream.bounding import CONDITIONING, OTHER, Bounding
from torchtrim.stream.images import LoadedFrames
from torchtrim.stream.lifetimes import Lifetime, pinned, volatile, window
from torchtrim.stream.records import Objects, Record, Records, Tracked, TrackedObjects, wrapped
from torchtrim.stream.state_bytes import state_bytes
from torchtrim.stream.store import StateStore

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
    """A predictor's `inference_state`, bounded. Made by `bound_state`; `release()` takes it back."""

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
        """Bytes of all tensors that the state holds alive, images and features too, each storage once."""
        return state_bytes(self.state)

    def release(self) -> None:
        """Take the bounds off: what is left stays, in plain dicts, and grows again."""
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
        """See `Owner`: the frame is done when its last object is."""
        each = self.state.get("frames_tracked_per_obj")
        if each is None or each[max(each)] is frames:
            self.end_frame(frame)

    def objects(self) -> Iterator[Mapping[str, Records]]:
        """See `Bounding`."""
        yield from self.state["output_dict_per_obj"].values()
        if self._whole:
            yield self._whole

    def absent(self, records: Records, frame: int, *, must: bool) -> Any:
        """See `Owner`. A frame that SAMURAI finds bad when it scans stays bad."""
        if must and self._good is not None and self._good.was_bad(records, frame):
            return self._good.bad
        return super().absent(records, frame, must=must)

    def lacks(self, record: Record, field: str) -> Any:
        """See `Owner`. A score of such a frame is the worst there is."""
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
    """Which frames SAMURAI would take into its memory, as its own scan decides."""

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
        """A frame was tracked; its scores say whether it is good."""
        record = records[frame]
        if record.get("best_iou_score") is None:
            return
        values = [record["best_iou_score"], record["object_score_logits"], record.get("kf_score")]
        found = zip(values, self._limits, strict=True)
        if frame in self._good:
            self._good.remove(frame)
        if all(value is None or float(value) > limit for value, limit in found):
            self._good.append(frame)

    def was_bad(self, records: Records, frame: int) -> bool:
        """Whether a frame that went was one that the scan passes over."""
        series = (*records.series, frame)
        gone = self._store.tombstone((f"{OTHER}.best_iou_score", series)) is not None
        return gone and (not self._forgot or frame > self._good[0])

    def retire(self, records: Records, now: int) -> None:
        """What neither the newest good frames nor the last two need goes."""
        while len(self._good) > self._scores:
            self._good.popleft()
            self._forgot = True
        scores = set(self._good)
        memories = {*list(self._good)[-self._memories :], now, now - 1}
        for fields, wanted, near in ((_MEMORY, memories, 1), (_SCORES, scores, self._scores)):
            for frame in [f for f in records if f not in wanted and abs(f - now) > near]:
                for field in fields:
                    key = (f"{OTHER}.{field}", (*records.series, frame))
                    self._store.evict(key, "newer frames are the memory now")


def bound_state(
    state: dict[str, Any],
    predictor: nn.Module,
    *,
    corrections: int = 0,
    turns: bool = True,
    **options: Any,
) -> BoundPredictorState:
    """Bound an `inference_state` of a video predictor of the `sam2` package, or of SAMURAI's.

    `state` is what `predictor.init_state` returned. While `propagate_in_video` runs, what no later frame
    reads goes after each frame; masks are equal to the bit to those without. `corrections=N` keeps what
    clicks up to N frames back need; `turns` the state needed to propagate from a prompt in either direction
    again. Images in one tensor cannot go one by one and stay; a loader's go and are read again on demand.
    What would read something evicted raises `Evicted`. `options` are those of `StateStore`.

    Read and measured with facebookresearch/sam2 at 2b90b9f and yangchris11/samurai at 76ba195. Raises
    `Unsupported` for a state that is laid out in another way, `UsageError` for one that is bound already.
    """
    if isinstance(state.get("output_dict_per_obj"), Objects):
        raise UsageError("this state is bound already; release() the first before binding again.")
    if set(state) not in _LAYOUTS.values():
        nearest = min(_LAYOUTS.values(), key=lambda known: len(known ^ set(state)))
        raise Unsupported(
            "this inference state is laid out in another way than in sam2 2b90b9f or samurai 76ba195: it "
            f"has {sorted(set(state) - nearest) or 'nothing more'} and lacks "
            f"{sorted(nearest - set(state)) or 'nothing'}. Nothing was changed."
        )
    samurai = _is_samurai(predictor)
    if samurai and "output_dict" not in state:
        raise Unsupported(
            "a predictor in samurai mode with a state that keeps each object on its own."
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
            f"the predictor does not say how far back it reads: {error}. Pass the video predictor that made "
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
