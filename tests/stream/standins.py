"""Small predictors and sessions of the same shape as theirs, without their packages and weights."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

SIDE, WIDTH = 4, 6


def _mix(parts: list[torch.Tensor]) -> torch.Tensor:
    total = torch.zeros(1, WIDTH)
    for number, part in enumerate(reversed(parts)):
        total = torch.tanh(total + part.flatten()[:WIDTH] * (0.2 + 0.05 * number))
    return total


class Predictor(nn.Module):
    """Tracks by mixing the memories that its state holds; `samurai_mode` chooses them by their scores."""

    def __init__(self, *, samurai: bool = False, together: bool = False) -> None:
        super().__init__()
        self.num_maskmem, self.max_obj_ptrs_in_encoder = 7, 16
        self.memory_temporal_stride_for_eval = 1
        self.samurai_mode, self.together = samurai, together
        self.memory_bank_iou_threshold = self.memory_bank_obj_score_threshold = 0.0
        self.memory_bank_kf_score_threshold = 0.0
        self.bad: set[int] = set()

    def init_state(self, images: Any) -> dict[str, Any]:
        """A new state, laid out as theirs."""
        state: dict[str, Any] = dict.fromkeys(
            ("offload_video_to_cpu", "offload_state_to_cpu", "video_height", "video_width"), 0
        )
        state |= {"images": images, "num_frames": len(images), "device": "cpu", "obj_ids": []}
        state |= {"storage_device": "cpu"}
        names = ("point_inputs_per_obj", "mask_inputs_per_obj", "cached_features", "constants")
        names += ("obj_id_to_idx", "obj_idx_to_id", "output_dict_per_obj")
        state |= {name: {} for name in (*names, "temp_output_dict_per_obj")}
        if self.together:
            state["output_dict"] = {"cond_frame_outputs": {}, "non_cond_frame_outputs": {}}
            state |= {"consolidated_frame_inds": {}, "tracking_has_started": False}
            state["frames_already_tracked"] = {}
        else:
            state["frames_tracked_per_obj"] = {}
        return state

    def click(self, state: dict[str, Any], frame: int, obj: int) -> None:
        """A prompt for an object."""
        if obj not in state["output_dict_per_obj"]:
            state["output_dict_per_obj"][obj] = {
                "cond_frame_outputs": {},
                "non_cond_frame_outputs": {},
            }
            if not self.together:
                state["frames_tracked_per_obj"][obj] = {}
        outputs = [state["output_dict_per_obj"][obj]]
        for output in outputs + ([state["output_dict"]] if self.together else []):
            previous = output["non_cond_frame_outputs"].get(frame)
            seen = state["images"][frame].float() + obj
            if previous is not None:
                seen = seen + previous["pred_masks"].flatten()[:1]
            output["cond_frame_outputs"][frame] = self._record(seen, frame)
            output["non_cond_frame_outputs"].pop(frame, None)

    def remove(self, state: dict[str, Any], obj: int) -> None:
        """Take an object out, and number those after it anew; without objects it is a reset."""
        there = sorted(state["output_dict_per_obj"])
        if there == [obj]:
            self.reset(state)
            return
        state["output_dict_per_obj"][obj]["cond_frame_outputs"].clear()
        numbers = {old: new for new, old in enumerate(one for one in there if one != obj)}
        for name in ("output_dict_per_obj", "frames_tracked_per_obj"):
            table = state[name]
            taken = [(old, table.pop(old)) for old in there]
            table.update([(numbers[old], value) for old, value in taken if old in numbers])

    def reset(self, state: dict[str, Any]) -> None:
        """Forget all objects."""
        for name in ("output_dict_per_obj", "frames_tracked_per_obj"):
            state[name].clear()

    def propagate(
        self, state: dict[str, Any], order: list[int], reverse: bool = False
    ) -> Iterator[torch.Tensor]:
        """Track through frames."""
        for frame in order:
            if self.together:
                yield self._track_together(state, frame, reverse)
                continue
            masks = []
            for obj, output in state["output_dict_per_obj"].items():
                masks.append(self._track(state, output, frame, reverse)["pred_masks"])
                state["frames_tracked_per_obj"][obj][frame] = {"reverse": reverse}
            yield torch.cat(masks)

    def _track_together(self, state: dict[str, Any], frame: int, reverse: bool) -> torch.Tensor:
        record = self._track(state, state["output_dict"], frame, reverse)
        kind = "cond" if frame in state["output_dict"]["cond_frame_outputs"] else "non_cond"
        for output in state["output_dict_per_obj"].values():
            output[f"{kind}_frame_outputs"][frame] = {
                name: record[name][:1]
                for name in ("maskmem_features", "obj_ptr", "pred_masks", "object_score_logits")
            } | {"maskmem_pos_enc": [one[:1] for one in record["maskmem_pos_enc"]]}
        state["frames_already_tracked"][frame] = {"reverse": reverse}
        masks = record["pred_masks"]
        assert isinstance(masks, torch.Tensor)
        return masks

    def _track(self, state: Any, output: Any, frame: int, reverse: bool) -> Any:
        if frame in output["cond_frame_outputs"]:
            return output["cond_frame_outputs"][frame]
        seen = [state["images"][frame].float()]
        seen += [one["maskmem_features"] for one in output["cond_frame_outputs"].values()]
        past, sign = output["non_cond_frame_outputs"], -1 if reverse else 1
        near = [frame - sign * step for step in range(1, self.num_maskmem)]
        for one in self._chosen(past, frame) if self.samurai_mode else near:
            found = past.get(one)
            if found is not None:
                seen += [found["maskmem_features"] + found["maskmem_pos_enc"][-1]]
        for step in range(1, self.max_obj_ptrs_in_encoder):
            found = past.get(frame - sign * step)
            if found is not None:
                seen.append(found["obj_ptr"])
        past[frame] = self._record(_mix(seen), frame)
        return past[frame]

    def _chosen(self, past: Any, frame: int) -> list[int]:
        good: list[int] = []
        for one in range(frame - 1, 1, -1):
            record = past[one]
            kf = record.get("kf_score")
            scores = [record["best_iou_score"], record["object_score_logits"], kf]
            if all(score is None or score.item() > 0 for score in scores):
                good.insert(0, one)
            if len(good) >= self.max_obj_ptrs_in_encoder - 1:
                break
        if frame - 1 not in good:
            good.append(frame - 1)
        return good[-(self.num_maskmem - 1) :]

    def _record(self, seen: torch.Tensor, frame: int) -> dict[str, Any]:
        seen = torch.tanh(seen.flatten()[:WIDTH].reshape(1, WIDTH))
        score = torch.tensor([[-1.0 if frame in self.bad else 1.0]])
        record = {
            "maskmem_features": seen.to(torch.bfloat16).clone(),
            "maskmem_pos_enc": [torch.full((1, WIDTH), 0.01)],
            "pred_masks": seen.repeat(1, SIDE),
            "obj_ptr": seen.flip(1).clone(),
            "object_score_logits": score,
        }
        if self.samurai_mode:
            record |= {
                "best_iou_score": score[0, 0],
                "kf_score": None if frame < 3 else score[0, 0],
            }
        return record


class Loader:
    """Reads images on demand and keeps all of them, in float64."""

    def __init__(self, frames: int) -> None:
        self.images: list[torch.Tensor | None] = [None] * frames

    def __getitem__(self, frame: int) -> torch.Tensor:
        found = self.images[frame]
        if found is None:
            made = torch.Generator().manual_seed(frame)
            found = torch.randn(WIDTH, generator=made, dtype=torch.float64)
            self.images[frame] = found
        return found

    def __len__(self) -> int:
        return len(self.images)


class Sam2VideoInferenceSession:
    """Laid out like the session of transformers of that name."""

    def __init__(self) -> None:
        self.processed_frames: Any = None
        for name in ("video_height", "video_width", "inference_device", "inference_state_device"):
            setattr(self, name, 0)
        self.video_storage_device = self.dtype = self.max_vision_features_cache_size = 0
        self.cache = SimpleNamespace(_vision_features={})
        self._obj_id_to_idx: Any = {}
        self._obj_idx_to_id: Any = {}
        self.obj_ids: Any = []
        self.point_inputs_per_obj: Any = {}
        self.mask_inputs_per_obj: Any = {}
        self.output_dict_per_obj: Any = {}
        self.frames_tracked_per_obj: Any = {}
        self.obj_with_new_inputs: Any = []


class Tracker(nn.Module):
    """Runs such a session: it reads what the model of that name reads, and no more."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(num_maskmem=7, max_object_pointers_in_encoder=16)

    def forward(self, inference_session: Any, frame: torch.Tensor) -> Any:
        """Track one object through the next frame."""
        session = inference_session
        if session.processed_frames is None:
            session.processed_frames = {}
        number = len(session.processed_frames)
        session.processed_frames[number] = frame
        session.cache._vision_features = {
            number: {"vision_feats": [frame], "vision_pos_embeds": [frame * 2, frame * 3]}
        }
        if 0 not in session.output_dict_per_obj:
            session.output_dict_per_obj[0] = {
                "cond_frame_outputs": {},
                "non_cond_frame_outputs": {},
            }
            session.frames_tracked_per_obj[0] = {}
        output = session.output_dict_per_obj[0]
        seen = [session.processed_frames[number]]
        seen += [one["maskmem_features"] for one in output["cond_frame_outputs"].values()]
        past = output["non_cond_frame_outputs"]
        for name, reach in (("maskmem_features", 6), ("object_pointer", 15)):
            found = [past.get(number - step) for step in range(1, reach + 1)]
            seen += [one[name] for one in found if one is not None]
        mixed = _mix(seen)
        kind = "non_cond_frame_outputs" if number else "cond_frame_outputs"
        output[kind][number] = {
            "pred_masks": mixed.repeat(1, SIDE),
            "high_res_masks": mixed.repeat(1, 4 * SIDE),
            "object_pointer": mixed.flip(1),
            "object_score_logits": mixed[:, :1],
            "maskmem_features": mixed.clone(),
            "maskmem_pos_enc": torch.zeros(1, WIDTH),
        }
        session.frames_tracked_per_obj[0][number] = {"reverse": False}
        return SimpleNamespace(pred_masks=mixed.repeat(1, SIDE), frame_idx=number)
