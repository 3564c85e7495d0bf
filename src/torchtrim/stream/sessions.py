"""Tracking sessions of transformers in bounded memory: SAM 2, SAM 3's tracker, EdgeTAM.

What the models read, in `_gather_memory_frame_outputs` and `_get_object_pointers` of transformers
5.23: of conditioning frames everything but the full-size masks; of other frames the memory of the last
`num_maskmem - 1` and the pointers of the last `max_object_pointers_in_encoder - 1`, nothing else. Of a
frame's position maps only the last.
"""

from __future__ import annotations

import sys
import weakref
from typing import Any

import torch
from torch import nn

from torchtrim.errors import Unsupported, UsageError
from torchtrim.stream.lifetimes import Lifetime, pinned, volatile, window
from torchtrim.stream.records import Frames, Objects, Record, Records, Tracked, TrackedObjects
from torchtrim.stream.state_bytes import state_bytes
from torchtrim.stream.store import StateStore
from torchtrim.stream.tombstones import Evicted

SESSIONS = (
    "Sam2VideoInferenceSession",
    "Sam3TrackerVideoInferenceSession",
    "EdgeTamVideoInferenceSession",
)
VERSIONS = ("5.23",)
_ATTRIBUTES = {
    *("processed_frames", "video_height", "video_width", "inference_device"),
    *("inference_state_device", "video_storage_device", "dtype", "max_vision_features_cache_size"),
    *("cache", "_obj_id_to_idx", "_obj_idx_to_id", "obj_ids", "point_inputs_per_obj"),
    *(
        "mask_inputs_per_obj",
        "output_dict_per_obj",
        "frames_tracked_per_obj",
        "obj_with_new_inputs",
    ),
}
_MEMORY = ("maskmem_features", "maskmem_pos_enc")
_POINTER = ("object_pointer",)
_SCORES = ("pred_masks", "object_score_logits")
_NEVER = ("high_res_masks",)
_CONDITIONING, _OTHER = "cond_frame_outputs", "non_cond_frame_outputs"


class BoundSession:
    """A session whose state is bounded. Made by `bound_session`; `release()` takes it back.

    `store` holds its entries and tombstones. `missed` counts reads of what was evicted, and
    `first_missed` is the frame of the first: both stay 0 and `None` unless `keep` is below the live set.
    """

    def __init__(
        self, session: Any, model: nn.Module, store: StateStore, *, turns: bool, strict: bool
    ) -> None:
        self.session = session
        self.store = store
        self.missed = 0
        self.first_missed: int | None = None
        self._turns = turns
        self._strict = strict
        self._touched: list[tuple[Records, int]] = []
        self._images: list[int] = []
        session.processed_frames = Frames(session.processed_frames, self)
        session.output_dict_per_obj = Objects(session.output_dict_per_obj, self)
        session.frames_tracked_per_obj = TrackedObjects(session.frames_tracked_per_obj)
        self._hook = model.register_forward_hook(_hook(weakref.ref(self)), with_kwargs=True)
        weakref.finalize(self, self._hook.remove)

    @property
    def bytes(self) -> int:
        """Bytes of all tensors that the session holds alive, images and features too, each storage once."""
        return state_bytes(self.session)

    def end_frame(self, frame: int) -> None:
        """A frame is done: let go what nothing will read. Called after each forward of the model.

        Raises `Unsupported` where the session holds a field that this adapter does not know.
        """
        store = self.store
        store.advance(frame)
        touched, self._touched = self._touched, []
        for records, written in touched:
            record = dict.get(records, written)
            if record is not None:
                self._adopt(records, record)
        images, self._images = self._images, []
        for image in images:
            if image in self.session.processed_frames:
                store.adopt(("image", image), self.session.processed_frames, image)
        _drop_unread_positions(self.session.cache)
        store.end()
        self._drop_empty()

    def release(self) -> None:
        """Take the bounds off: what is left stays, in plain dicts, and grows again.

        The frames keep their numbers, so `processed_frames` stays one that counts what went.
        """
        self._hook.remove()
        for key in list(self.store):
            self.store.recall(key)
        session = self.session
        session.output_dict_per_obj = {
            number: {
                kind: {f: dict(r) for f, r in records.items()} for kind, records in kinds.items()
            }
            for number, kinds in session.output_dict_per_obj.items()
        }
        session.frames_tracked_per_obj = {
            number: dict(frames) for number, frames in session.frames_tracked_per_obj.items()
        }
        self._strict = True

    def wrote(self, records: Records, frame: int) -> None:
        """See `Owner`."""
        self._touched.append((records, frame))
        if records.kind == _CONDITIONING and self._turns:
            self.store.anchor(frame)

    def absent(self, records: Records, frame: int) -> None:
        """See `Owner`."""
        field = f"{records.kind}.object_pointer"
        tombstone = self.store.tombstone((field, (*records.series, frame)))
        if tombstone is None:
            return
        if self._strict:
            raise Evicted(tombstone, _ADVICE)
        self.missed += 1
        if self.first_missed is None:
            self.first_missed = self._images[-1] if self._images else self.store.now

    def lacks(self, record: Record, field: str) -> Any:
        """See `Owner`."""
        key = (f"{record.records.kind}.{field}", (*record.records.series, record.frame))
        if key[0] not in self.store.fields:
            raise KeyError(field)
        if self.store.recall(key):
            return record[field]
        tombstone = self.store.tombstone(key)
        if tombstone is None:
            raise KeyError(field)
        raise Evicted(tombstone, _ADVICE)

    def cleared(self) -> None:
        """See `Owner`."""
        self._touched.clear()
        self.store.reset()

    def new_frame(self, frames: Frames, frame: int) -> None:
        """See `Owner`."""
        if frame not in frames.kept:
            self._images.append(frame)

    def _adopt(self, records: Records, record: Record) -> None:
        kind, entry = records.kind, (*records.series, record.frame)
        for field in record:
            name = f"{kind}.{field}"
            if name not in self.store.fields:
                raise Unsupported(
                    f"the session's record of frame {record.frame} has a field {field!r} that this adapter "
                    "does not know, so it cannot tell when it is read. Nothing was evicted of this frame. "
                    f"It knows transformers {', '.join(VERSIONS)}; release() lets the session run unbounded."
                )
            self.store.adopt((name, entry), record, field)

    def _drop_empty(self) -> None:
        for kinds in self.session.output_dict_per_obj.values():
            records = kinds[_OTHER]
            for frame in [frame for frame, record in records.items() if not record]:
                entry = (*records.series, frame)
                if not any((f"{_OTHER}.{f}", entry) in self.store for f in (*_POINTER, *_MEMORY)):
                    del records[frame]


_ADVICE = (
    "The unbounded session would have read it, so going on would change the result. To come back to "
    "frames that far, bind the session with corrections=N, N frames back, or turns=True for turning "
    "round at prompts."
)


def bound_session(
    session: Any,
    model: nn.Module,
    *,
    corrections: int = 0,
    turns: bool | None = None,
    keep: int | None = None,
    trust_version: bool = False,
    **options: Any,
) -> BoundSession:
    """Bound a session of `Sam2VideoModel`, `Sam3TrackerVideoModel` or `EdgeTamVideoModel`.

    `session` is what their processor's `init_video_session` gives, `model` the model that will run it;
    several sessions may share it. After each frame what no later frame reads goes. Results are equal to
    the bit to those without, for streams forward and reverse, however long. Going back to a frame reads
    what was before it: `corrections=N` keeps what prompts up to N frames back need, their images too.
    `turns` keeps what is needed to run from a prompt in either direction again; by default that is on
    where the whole video was given at the start. Frames of such a video stay: they are the input.
    Whatever would read something evicted raises `Evicted` and does not go on with another result.

    `keep=n` keeps n frames, fewer than are read. Results may then differ; `missed` and `first_missed` tell
    whether and from where. `options` are those of `StateStore`: budget, policy, spill, every.

    Made for transformers 5.23; raises `Unsupported` for other versions, unless `trust_version`, and for
    sessions laid out in another way. Raises `UsageError` for a session that is bound already.
    """
    _check_layout(session, model, trust_version)
    config: Any = model.config
    memories = config.num_maskmem - 1 + corrections
    pointers = config.max_object_pointers_in_encoder - 1 + corrections
    if keep is not None:
        if keep < 1:
            raise UsageError(f"keep={keep}: give how many frames to keep, 1 or more.")
        memories, pointers = min(memories, keep - 1), min(pointers, keep - 1)
    if turns is None:
        turns = session.processed_frames is not None
    fields = _fields(max(memories, 0), max(pointers, 0), corrections)
    store = StateStore(fields, **options)
    return BoundSession(session, model, store, turns=turns, strict=keep is None)


def _fields(memories: int, pointers: int, corrections: int) -> dict[str, Lifetime]:
    fields = {"image": window(corrections) if corrections else volatile()}
    for kind, kept, names in (
        (_CONDITIONING, pinned(), [*_MEMORY, *_POINTER, *_SCORES]),
        (_CONDITIONING, volatile(), [*_NEVER]),
        (_OTHER, window(memories), [*_MEMORY]),
        (_OTHER, window(pointers), [*_POINTER]),
        (_OTHER, volatile(), [*_SCORES, *_NEVER]),
    ):
        fields |= {f"{kind}.{name}": kept for name in names}
    return fields


def _check_layout(session: Any, model: nn.Module, trust_version: bool) -> None:
    names = [one.__name__ for one in type(session).__mro__]
    if not set(SESSIONS).intersection(names):
        raise Unsupported(
            f"{type(session).__name__} is no session that torchtrim can bound; it knows "
            f"{', '.join(SESSIONS)} of transformers. For other state declare its fields with StateStore."
        )
    if isinstance(getattr(session, "output_dict_per_obj", None), Objects):
        raise UsageError("this session is bound already; release() the first before binding again.")
    found = set(vars(session))
    if found != _ATTRIBUTES:
        raise Unsupported(
            f"this {names[0]} is laid out in another way than in transformers {', '.join(VERSIONS)}: it has "
            f"{sorted(found - _ATTRIBUTES) or 'nothing more'} and lacks "
            f"{sorted(_ATTRIBUTES - found) or 'nothing'}. What it reads is not known, so nothing was changed."
        )
    version = _version(session)
    if not trust_version and not version.startswith(tuple(f"{known}." for known in VERSIONS)):
        raise Unsupported(
            f"{type(session).__module__.partition('.')[0]} {version or 'of no version'} is not one this "
            f"adapter was read and measured with ({', '.join(VERSIONS)}). Compare a bounded with an "
            "unbounded run over 40 frames, then pass trust_version=True."
        )
    for name in ("num_maskmem", "max_object_pointers_in_encoder"):
        if not isinstance(getattr(getattr(model, "config", None), name, None), int):
            raise Unsupported(
                f"the model's config has no {name}, which says how far back it reads. Pass the model "
                "that runs this session."
            )


def _version(session: Any) -> str:
    package = sys.modules.get(type(session).__module__.partition(".")[0])
    return str(getattr(package, "__version__", ""))


def _hook(owner: weakref.ref[BoundSession]) -> Any:
    def ended(model: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        bound = owner()
        session = kwargs.get("inference_session", args[0] if args else None)
        if bound is not None and session is bound.session:
            bound.end_frame(output.frame_idx)

    return ended


def _drop_unread_positions(cache: Any) -> None:
    for features in cache._vision_features.values():
        maps = features.get("vision_pos_embeds")
        if isinstance(maps, list):
            for number, one in enumerate(maps[:-1]):
                if one.numel():
                    maps[number] = torch.empty(0, dtype=one.dtype, device=one.device)


__all__ = ["SESSIONS", "VERSIONS", "BoundSession", "Tracked", "bound_session"]
