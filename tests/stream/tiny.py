"""Small tracking models with random weights whose masks vary, and streams for them."""

from __future__ import annotations

import hashlib
import importlib
from typing import Any

import torch

SIDE = 64
FAMILIES = ("Sam2Video", "Sam3TrackerVideo", "EdgeTamVideo")
_MODULES = {
    "Sam2Video": "transformers.models.sam2_video",
    "Sam3TrackerVideo": "transformers.models.sam3_tracker_video",
    "EdgeTamVideo": "transformers.models.edgetam_video",
}


def tracker(family: str = "Sam2Video", seed: int = 0) -> Any:
    """A small model of a family. Its object score is biased: else it says "no object" to everything."""
    transformers = importlib.import_module("transformers")
    torch.manual_seed(seed)
    config = getattr(transformers, f"{family}Config")(**_settings(family, transformers))
    model = getattr(transformers, f"{family}Model")(config).eval()
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not name.startswith("vision_encoder") and parameter.dim() > 1:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_(noise * 0.7 / parameter.shape[-1] ** 0.5)
        model.mask_decoder.pred_obj_score_head.proj_out.bias.fill_(50.0)
    return model


def _settings(family: str, transformers: Any) -> dict[str, Any]:
    small = SIDE // 16
    sizes = [[small * 4, small * 4], [small * 2, small * 2], [small, small]]
    shared: dict[str, Any] = {
        "prompt_encoder_config": {"image_size": SIDE, "patch_size": 16, "hidden_size": 128},
        "mask_decoder_config": {
            **{"hidden_size": 128, "mlp_dim": 32, "num_hidden_layers": 2},
            **{"num_attention_heads": 2, "iou_head_hidden_dim": 32},
        },
        "image_size": SIDE,
        "memory_attention_hidden_size": 128,
        "memory_attention_num_layers": 1,
        "memory_attention_rope_feat_sizes": [small, small],
        "memory_encoder_hidden_size": 128,
        "memory_encoder_output_channels": 64,
        "mask_downsampler_embed_dim": 128,
        "memory_fuser_embed_dim": 128,
        "memory_fuser_intermediate_dim": 32,
        "memory_fuser_num_layers": 1,
    }
    return shared | getattr(_Families, family)(transformers, sizes)


class _Families:
    @staticmethod
    def Sam2Video(transformers: Any, sizes: list[list[int]]) -> dict[str, Any]:  # noqa: N802
        backbone = transformers.Sam2HieraDetConfig(
            image_size=[SIDE, SIDE],
            hidden_size=16,
            num_attention_heads=1,
            blocks_per_stage=[1, 1, 2, 1],
            embed_dim_per_stage=[16, 32, 64, 128],
            num_attention_heads_per_stage=[1, 2, 4, 8],
            window_size_per_stage=[4, 2, 4, 2],
            global_attention_blocks=[3],
        )
        vision = transformers.Sam2VisionConfig(
            backbone_config=backbone,
            backbone_channel_list=[128, 64, 32, 16],
            backbone_feature_sizes=sizes,
            fpn_hidden_size=128,
        )
        return {
            "vision_config": vision,
            "memory_attention_feed_forward_hidden_size": 32,
            "enable_temporal_pos_encoding_for_object_pointers": True,
            "enable_occlusion_spatial_embedding": True,
        }

    @staticmethod
    def EdgeTamVideo(transformers: Any, sizes: list[list[int]]) -> dict[str, Any]:  # noqa: N802
        return {
            **_Families.Sam2Video(transformers, sizes),
            "memory_attention_mlp_hidden_size": 32,
            "memory_attention_rope_k_sizes": [4, 4],
            "perceiver_resampler_num_latents": 16,
            "perceiver_resampler_num_latents_2d": 16,
            "perceiver_resampler_hidden_size": 64,
            "perceiver_resampler_mlp_intermediate_size": 32,
            "perceiver_resampler_attention_head_dim": 64,
        }

    @staticmethod
    def Sam3TrackerVideo(transformers: Any, sizes: list[list[int]]) -> dict[str, Any]:  # noqa: N802
        backbone = {
            "model_type": "sam3_vit_model",
            **{"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2},
            **{"num_attention_heads": 2, "image_size": SIDE, "patch_size": 16},
            **{"window_size": 4, "global_attn_indexes": [1], "pretrain_image_size": SIDE},
        }
        vision = transformers.Sam3VisionConfig(
            backbone_config=backbone, backbone_feature_sizes=sizes, fpn_hidden_size=128
        )
        return {"vision_config": vision, "memory_attention_feed_forward_hidden_size": 32}


def session(model: Any, video: torch.Tensor | None = None, **options: Any) -> Any:
    """A new session of a model, as its processor makes them."""
    family = type(model).__name__.removesuffix("Model")
    module = importlib.import_module(
        _MODULES[family] + ".modeling_" + _MODULES[family].split(".")[-1]
    )
    made = getattr(module, f"{family}InferenceSession")
    return made(video, SIDE, SIDE, dtype=torch.float32, **options)


def prompt(inference: Any, frame: int, number: int = 1, at: tuple[float, float] = (20, 24)) -> None:
    """A click on an object in a frame."""
    index = inference.obj_id_to_idx(number)
    points = {
        "point_coords": torch.tensor([[[list(at)]]]),
        "point_labels": torch.ones(1, 1, 1, dtype=torch.int32),
    }
    inference.add_point_inputs(index, frame, points)
    inference.obj_with_new_inputs = [*inference.obj_with_new_inputs, number]


def image(frame: int, stream: int = 0) -> torch.Tensor:
    """A frame of a stream: the same for the same numbers."""
    generator = torch.Generator().manual_seed(1000 * stream + frame)
    return torch.randn(1, 3, SIDE, SIDE, generator=generator)


def digest(masks: torch.Tensor) -> str:
    """A hash of every bit of the masks."""
    return hashlib.sha256(masks.float().contiguous().numpy().tobytes()).hexdigest()


def vary(outputs: list[torch.Tensor]) -> bool:
    """Whether masks say more than "no object", and differ from frame to frame."""
    seen = {digest(masks) for masks in outputs}
    return len(seen) > len(outputs) // 2 and all(
        float(masks.max()) > -1000 for masks in outputs[:2]
    )
