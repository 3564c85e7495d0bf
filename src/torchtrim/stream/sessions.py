"""Bound the tracking sessions of transformers: SAM 2, SAM 3's tracker, EdgeTAM.

The models (`_gather_memory_frame_outputs` and `_get_object_pointers` of transformers 5.23) read all fields of
conditioning frames except the full-size masks, the memory of the last `num_maskmem - 1` other frames, the
pointers of the last `max_object_pointers_in_encoder - 1` other frames, and a frame's last position map.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from torchtrim.errors import Unsupported, UsageError
from torchtrim.stream.lifetimes import Lifetime, pinned, volatile, window
from torchtrim.stream.records import CONDITIONING, OTHER, Bounding, Objects, Records, TrackedObjects
from torchtrim.stream.storages import state_bytes
from torchtrim.stream.store import StateStore
from torchtrim.stream.tombstones import Frames

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


class BoundSession(Bounding):
    """A session with bounded state, created by `bound_session` and undone by `release()`."""

    live = (*_POINTER, *_MEMORY)

    def __init__(
        self,
        session: Any,
        model: nn.Module,
        store: StateStore,
        corrections: int,
        *,
        turns: bool,
        strict: bool,
    ) -> None:
        super().__init__(store, turns=turns, strict=strict)
        self.session = session
        self._images: list[int] = []
        self._corrections = corrections
        session.processed_frames = Frames(session.processed_frames, self._new_image)
        session.output_dict_per_obj = Objects(session.output_dict_per_obj, self)
        session.frames_tracked_per_obj = TrackedObjects(session.frames_tracked_per_obj, self)
        self._hook = model.register_forward_hook(_hook(weakref.ref(self)), with_kwargs=True)
        weakref.finalize(self, self._hook.remove)

    @property
    def bytes(self) -> int:
        """Bytes of all storages that the session keeps alive, including images, each counted once."""
        return state_bytes(self.session)

    def release(self) -> None:
        """Remove the bounds: remaining entries move to plain dicts, which grow again.

        Frames keep their numbers, so `processed_frames` still counts evicted frames.
        """
        self._hook.remove()
        for key in list(self.store):
            self.store.recall(key)
        self.session.output_dict_per_obj = self.session.output_dict_per_obj.plain()
        self.session.frames_tracked_per_obj = self.session.frames_tracked_per_obj.plain()

    def objects(self) -> Iterator[Mapping[str, Records]]:
        """See `Bounding`."""
        return iter(self.session.output_dict_per_obj.values())

    def before_end(self, frame: int, touched: list[tuple[Records, int]]) -> None:
        """See `Bounding`."""
        images, self._images = self._images, []
        frames = self.session.processed_frames
        for image in images:
            if not self._corrections:
                dict.pop(frames, image, None)
            elif image in frames:
                self.store.adopt(("image", image), frames, image)
        _drop_unread_positions(self.session.cache)

    def _new_image(self, frame: int) -> None:
        self._images.append(frame)
        self._reading = frame


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

    `session` is the return value of the processor's `init_video_session`, and `model` the model that runs it;
    several sessions may share a model. After each frame, entries that no later frame reads are evicted.
    Results are identical bit for bit, for forward and reverse streams of any length. Going back to a frame
    reads the frames before it: `corrections=N` keeps what prompts up to N frames back need, images
    included. `turns` keeps what running again from a prompt needs, in either direction; it is on by default
    if the session started with a whole video. The frames of such a video stay, since they are the input.
    Reading an evicted entry raises `Evicted` rather than continuing with another result.

    `keep=n` keeps only n frames, fewer than the model reads. Results may then differ: `missed` counts such
    reads and `first_missed` is the first frame with one. `options` are those of `StateStore`: budget,
    policy, spill, every.

    Made for transformers 5.23. Raises `Unsupported` for other versions (unless `trust_version`) and for
    sessions of another layout, and `UsageError` for a session that is already bound.
    """
    _check_layout(session, model, trust_version)
    config: Any = model.config
    memories = config.num_maskmem - 1 + corrections
    pointers = config.max_object_pointers_in_encoder - 1 + corrections
    if keep is not None:
        if keep < 1:
            raise UsageError(f"keep={keep}: the number of frames to keep must be 1 or more.")
        memories, pointers = min(memories, keep - 1), min(pointers, keep - 1)
    if turns is None:
        turns = session.processed_frames is not None
    fields = _fields(max(memories, 0), max(pointers, 0), corrections)
    store = StateStore(fields, **options)
    return BoundSession(session, model, store, corrections, turns=turns, strict=keep is None)


def _fields(memories: int, pointers: int, corrections: int) -> dict[str, Lifetime]:
    fields = {"image": window(corrections) if corrections else volatile()}
    for kind, kept, names in (
        (CONDITIONING, pinned(), [*_MEMORY, *_POINTER, *_SCORES]),
        (CONDITIONING, volatile(), [*_NEVER]),
        (OTHER, window(memories), [*_MEMORY]),
        (OTHER, window(pointers), [*_POINTER]),
        (OTHER, volatile(), [*_SCORES, *_NEVER]),
    ):
        fields |= {f"{kind}.{name}": kept for name in names}
    return fields


def _check_layout(session: Any, model: nn.Module, trust_version: bool) -> None:
    names = [one.__name__ for one in type(session).__mro__]
    if not set(SESSIONS).intersection(names):
        raise Unsupported(
            f"cannot bound a {type(session).__name__}: expected {', '.join(SESSIONS)} of transformers. "
            "For other state, declare its fields with StateStore."
        )
    if isinstance(getattr(session, "output_dict_per_obj", None), Objects):
        raise UsageError("this session is already bound; call release() before binding it again.")
    attributes = set(vars(session))
    if attributes != _ATTRIBUTES:
        raise Unsupported(
            f"the layout of this {names[0]} differs from transformers {', '.join(VERSIONS)}: it has "
            f"{sorted(attributes - _ATTRIBUTES) or 'nothing more'} and lacks "
            f"{sorted(_ATTRIBUTES - attributes) or 'nothing'}, so it is unknown what "
            "it reads. Nothing was changed."
        )
    package = type(session).__module__.partition(".")[0]
    version = str(getattr(sys.modules.get(package), "__version__", ""))
    if not trust_version and not version.startswith(tuple(f"{known}." for known in VERSIONS)):
        raise Unsupported(
            f"this adapter was not tested with {package} {version or 'of unknown version'}, only with "
            f"{', '.join(VERSIONS)}. Compare a bounded run with an unbounded run over 40 frames, then "
            "pass trust_version=True."
        )
    for name in ("num_maskmem", "max_object_pointers_in_encoder"):
        if not isinstance(getattr(getattr(model, "config", None), name, None), int):
            raise Unsupported(
                f"the model's config has no {name}, so it is unknown how far back it reads. Pass the "
                "model that runs this session."
            )


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
                    maps[number] = _nothing(one.dtype, one.device)


@functools.cache
def _nothing(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty(0, dtype=dtype, device=device)
