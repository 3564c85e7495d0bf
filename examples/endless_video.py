"""Track an object through video that never ends, and watch the memory of the tracking session.

python examples/endless_video.py                 bounded: flat
python examples/endless_video.py --unbounded     as transformers does it: rising
python examples/endless_video.py --frames 500    stop after that many

A small Sam2VideoModel with random weights looks at a moving disc, so nothing is downloaded; the masks
mean nothing, the memory does. Needs transformers 5.23.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator

import torch
from transformers import Sam2HieraDetConfig, Sam2VideoConfig, Sam2VideoModel, Sam2VisionConfig
from transformers.models.sam2_video.modeling_sam2_video import Sam2VideoInferenceSession

from torchtrim.stream import bound_session, state_bytes

SIDE = 128
WIDTH = 50


def model() -> Sam2VideoModel:
    """SAM 2 with few channels. The object score is biased: random weights would never see an object."""
    levels = [[SIDE // 4] * 2, [SIDE // 8] * 2, [SIDE // 16] * 2]
    backbone = Sam2HieraDetConfig(
        image_size=[SIDE, SIDE],
        hidden_size=16,
        num_attention_heads=1,
        blocks_per_stage=[1, 1, 2, 1],
        embed_dim_per_stage=[16, 32, 64, 128],
        num_attention_heads_per_stage=[1, 2, 4, 8],
        window_size_per_stage=[8, 4, 8, 4],
        global_attention_blocks=[3],
    )
    vision = Sam2VisionConfig(
        backbone_config=backbone,
        backbone_channel_list=[128, 64, 32, 16],
        backbone_feature_sizes=levels,
        fpn_hidden_size=128,
    )
    config = Sam2VideoConfig(
        vision_config=vision,
        prompt_encoder_config={"image_size": SIDE, "patch_size": 16, "hidden_size": 128},
        mask_decoder_config={"hidden_size": 128, "mlp_dim": 64, "iou_head_hidden_dim": 64},
        image_size=SIDE,
        memory_attention_hidden_size=128,
        memory_attention_num_layers=1,
        memory_attention_feed_forward_hidden_size=64,
        memory_attention_rope_feat_sizes=levels[-1],
        memory_encoder_hidden_size=128,
        mask_downsampler_embed_dim=128,
        memory_fuser_embed_dim=128,
        memory_fuser_intermediate_dim=64,
    )
    torch.manual_seed(0)
    made = Sam2VideoModel(config).eval()
    with torch.no_grad():
        made.mask_decoder.pred_obj_score_head.proj_out.bias.fill_(20.0)
    return made


def video() -> Iterator[torch.Tensor]:
    """A disc on its way through noise, for ever."""
    rows, columns = torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij")
    for number in itertools.count():
        angle = torch.tensor(number / 20)
        row, column = SIDE / 2 + SIDE / 4 * angle.sin(), SIDE / 2 + SIDE / 4 * angle.cos()
        disc = ((rows - row) ** 2 + (columns - column) ** 2 < 200).float()
        yield (disc * 2 + torch.randn(3, SIDE, SIDE) * 0.1)[None]


def main() -> None:
    """Track until stopped, one line a frame."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--unbounded", action="store_true", help="let the session grow")
    parser.add_argument("--frames", type=int, help="stop after so many frames")
    options = parser.parse_args()
    tracker = model()
    session = Sam2VideoInferenceSession(None, SIDE, SIDE, dtype=torch.float32)
    if not options.unbounded:
        bound_session(session, tracker)
    points = {
        "point_coords": torch.tensor([[[[SIDE * 0.75, SIDE / 2]]]]),
        "point_labels": torch.ones(1, 1, 1, dtype=torch.int32),
    }
    session.add_point_inputs(session.obj_id_to_idx(1), 0, points)
    session.obj_with_new_inputs = [1]
    full = 0
    torch.manual_seed(1)
    for number, image in enumerate(itertools.islice(video(), options.frames)):
        mask = tracker(session, frame=image).pred_masks
        held = state_bytes(session)
        full = max(full, held, 4 * 2**20)
        bar = "#" * round(WIDTH * held / full)
        seen = float((mask > 0).float().mean())
        end = "\r" if sys.stdout.isatty() else "\n"
        print(
            f"frame {number:6}  {held / 2**20:7.2f} MiB |{bar:<{WIDTH}}| mask {seen:4.0%}",
            end=end,
            flush=True,
        )
    print()


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        print()
