"""Streams in constant memory: growth, equality and price, with the models of the tests.

python -m bench.streams --frames 10000 --json        a small Sam2VideoModel, bounded and not
python -m bench.streams --kv 50000                   keys and values against a masked oracle
python -m bench.streams --cleaning                   how often to clean, against memory and time
python -m bench.streams --full 20                    Sam2VideoModel at its default size, 1024x1024
python -m bench.streams --package sam2 CHECKOUT      the original package on its own 200 frames; needs
python -m bench.streams --package samurai CHECKOUT --video FOLDER     hydra-core, iopath and pillow
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from bench.machine import with_spread
from torchtrim.stream import (
    StateStore,
    Watermarks,
    bound_session,
    bound_state,
    sink_cache,
    state_bytes,
    volatile,
    window,
    window_mask,
)
from torchtrim.stream.growth import process_bytes

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from stream import test_kv as kv
from stream import tiny

WARM = 100
IMAGES = 64


def measure(frames: int, unbounded: int) -> dict[str, Any]:
    """Stream frames through a small model; the first `unbounded` of them without bounds as well."""
    torch.set_num_threads(1)
    model = tiny.tracker()
    images = [tiny.image(number) for number in range(IMAGES)]
    session, free = tiny.session(model), tiny.session(model)
    bound = bound_session(session, model)
    ends = _timed(bound)
    for one in (session, free):
        tiny.prompt(one, 0)
    seen: set[str] = set()
    equal, sizes, resident = True, {}, {}
    for frame in range(frames):
        image = images[frame * frame % IMAGES]
        masks = tiny.digest(model(session, frame=image).pred_masks)
        seen.add(masks)
        if frame < unbounded:
            equal = equal and masks == tiny.digest(model(free, frame=image).pred_masks)
        elif frame == unbounded:
            free = None
            gc.collect()
        if frame in (min(WARM, frames // 2), max(unbounded + 50, WARM), frames - 1):
            sizes[frame], resident[frame] = bound.bytes, process_bytes()
    first, last = min(sizes), max(sizes)
    later = sorted(resident)[-2:]
    return {
        "frames": frames,
        "growth_bytes": sizes[last] - sizes[first],
        "masks_equal": equal,
        "masks_vary": len(seen) > min(frames, IMAGES) // 2,
        "overhead_us_per_frame": round(statistics.median(ends) * 1e6 + _reading_us(session), 1),
        "session_bytes": sizes[last],
        "_compared": min(frames, unbounded),
        "_process_growth": [*later, resident[later[-1]] - resident[later[0]]],
    }


def _timed(bound: Any) -> list[float]:
    ends: list[float] = []
    end_frame = bound.end_frame

    def timed(frame: int) -> None:
        begin = time.perf_counter()
        end_frame(frame)
        ends.append(time.perf_counter() - begin)

    bound.end_frame = timed
    return ends


def _reading_us(session: Any) -> float:
    """Microseconds that a frame's reads of the session's dicts take beyond those of plain dicts."""
    output = session.output_dict_per_obj[0]
    past = output["non_cond_frame_outputs"]
    last = max(past)
    plain = {frame: dict(record) for frame, record in past.items()}

    def reads(records: Any) -> float:
        begin = time.perf_counter()
        for step in range(6):
            record = records.get(last - step)
            record["maskmem_features"], record["maskmem_pos_enc"]
        for step in range(15):
            records.get(last - step)["object_pointer"]
        return time.perf_counter() - begin

    times = [reads(past) - reads(plain) for _ in range(500)]
    return statistics.median(times) * 1e6


def full_size(frames: int) -> dict[str, Any]:
    """The session's bytes at the model's default size, frame by frame."""
    import transformers

    model = transformers.Sam2VideoModel(transformers.Sam2VideoConfig()).eval()
    with torch.no_grad():
        model.mask_decoder.pred_obj_score_head.proj_out.bias.fill_(50.0)
    session = tiny.session(model)
    bound = bound_session(session, model)
    tiny.prompt(session, 0, at=(300, 400))
    sizes = []
    for frame in range(frames):
        image = torch.randn(1, 3, 1024, 1024, generator=torch.Generator().manual_seed(frame))
        model(session, frame=image)
        sizes.append(bound.bytes)
    return {"frames": frames, "session_bytes": sizes}


def keys_and_values(tokens: int, chunk: int = 250) -> dict[str, Any]:
    """Small language models with sinks and a window, token by token, against everything kept and masked."""
    torch.set_num_threads(1)
    sinks, width = 4, 60
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    kinds: dict[str, tuple[int, dict[str, Any]]] = {
        "default rotary": (1, {"max_position_embeddings": tokens}),
        "dynamic rotary": (chunk, {"max_position_embeddings": 512, "rope_parameters": rope}),
    }
    return {
        f"{family}, {kind}": _compared(family, options, tokens, one, chunk, sinks, width)
        for family in kv.FAMILIES
        for kind, (one, options) in kinds.items()
    }


@torch.no_grad()
def _compared(
    family: str, options: Any, tokens: int, one: int, chunk: int, sinks: int, width: int
) -> dict[str, Any]:
    import transformers

    model, other = kv.language_model(family, **options), kv.language_model(family, **options)
    cache = sink_cache(model.config, sinks=sinks, window=width)
    kept = transformers.DynamicCache(config=other.config)
    error, sizes, places, largest = 0.0, set(), set(), 0.0
    ids = kv.tokens(tokens)
    for begin in range(0, tokens, chunk):
        part = ids[:, begin : begin + chunk]
        got = []
        for few in part.split(one, dim=1):
            mask = window_mask(cache, few.shape[1], torch.float32) if few.shape[1] > 1 else None
            got.append(model(few, past_key_values=cache, attention_mask=mask).logits)
        own = torch.arange(begin, begin + part.shape[1])[:, None]
        row = torch.arange(begin + part.shape[1])[None, :]
        mask = kv.additive((row <= own) & ((row < sinks) | (row > own - width)))
        want = other(part, past_key_values=kept, attention_mask=mask).logits
        error = max(error, float((torch.cat(got, dim=1) - want).abs().max()))
        largest = max(largest, float(want.abs().max()))
        sizes.add(sum(layer.bytes for layer in cache.layers))
        places.add(tuple(layer.keys.data_ptr() for layer in cache.layers))
    return {
        "tokens": tokens,
        "given_together": one,
        "largest_error": error,
        "largest_logit": largest,
        "cache_bytes": sorted(sizes),
        "addresses": len(places),
        "unbounded_bytes": sum(layer.keys.nbytes + layer.values.nbytes for layer in kept.layers),
    }


def cleaning(frames: int = 1000) -> dict[str, Any]:
    """Cleaning after each frame, each so many, or at a watermark: the most bytes held, and the time."""
    live = 16 * 4 * 1000 + 4 * 10_000
    out: dict[str, Any] = {}
    for name, every in (("1", 1), ("4", 4), ("16", 16), ("64", 64), ("at 1.5x the live set", 0)):
        rounds = [_cleaned(frames, every, int(1.5 * live)) for _ in range(5)]
        out[f"every {name}" if every else name] = {
            "highest_bytes": rounds[0][0],
            "times_live_set": round(rounds[0][0] / live, 2),
            "cleanings": rounds[0][1],
            "us_per_frame": with_spread([one[2] for one in rounds]),
        }
    return out


def _cleaned(frames: int, every: int, limit: int) -> tuple[int, int, float]:
    store = StateStore({"image": volatile(), "pointer": window(15)}, every=every)
    marks = Watermarks(store, limit, target=0.7, spill=1.0, pause=9.0, terminate=9.0)
    image, pointer = torch.zeros(10_000), torch.zeros(1000)
    highest, begin = 0, time.perf_counter()
    spent = 0.0
    for frame in range(frames):
        values = image.clone(), pointer.clone()
        begin = time.perf_counter()
        store.advance(frame)
        store["image", frame], store["pointer", frame] = values
        highest = max(highest, store.bytes)
        store.end()
        if not every:
            marks.check()
        spent += time.perf_counter() - begin
    return highest, marks.cleanings if not every else frames // every, spent / frames * 1e6


def package(kind: str, checkout: str, video: str | None, frames: int) -> dict[str, Any]:
    """A checkout of the original package, or of SAMURAI, on frames of a video: bounded and not."""
    sys.path.insert(0, checkout)
    torch.set_num_threads(1)
    predictor = _predictor(kind)
    folder = video or str(Path(checkout) / "notebooks/videos/bedroom")
    free, growing = _propagated(kind, predictor, folder, frames, False)
    tied, held = _propagated(kind, predictor, folder, frames, True)
    return {
        "frames": len(free),
        "masks_equal": free == tied,
        "masks_vary": len(set(free)) > len(free) // 2,
        "unbounded_bytes_per_frame": growing,
        "bounded_bytes_per_frame": held,
    }


def _predictor(kind: str) -> Any:
    from sam2.build_sam import build_sam2_video_predictor

    folder = "samurai" if kind == "samurai" else "sam2.1"
    torch.manual_seed(0)
    predictor = build_sam2_video_predictor(
        f"configs/{folder}/sam2.1_hiera_t.yaml",
        ckpt_path=None,
        device="cpu",
        hydra_overrides_extra=["++model.image_size=256"],
        apply_postprocessing=False,
    )
    made = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in predictor.named_parameters():
            if parameter.dim() > 1 and not name.startswith("image_encoder"):
                noise = torch.randn(parameter.shape, generator=made)
                parameter.add_(noise * 0.5 / parameter.shape[-1] ** 0.5)
        decoder = predictor.sam_mask_decoder
        for head, bias in ((decoder.pred_obj_score_head, 50.0), (decoder.iou_prediction_head, 0.6)):
            last = [one for one in head.modules() if isinstance(one, torch.nn.Linear)][-1]
            last.bias.fill_(bias)
    return predictor


@torch.inference_mode()
def _propagated(
    kind: str, predictor: Any, folder: str, frames: int, bounded: bool
) -> tuple[list[str], float]:
    import numpy

    predictor.kf_mean = predictor.kf_covariance = None
    predictor.stable_frames = predictor.frame_cnt = 0
    state = predictor.init_state(folder)
    if bounded:
        bound_state(state, predictor)
    box = numpy.array([100.0, 100, 300, 300])
    predictor.add_new_points_or_box(state, box=box, frame_idx=0, obj_id=0)
    masks, sizes = [], []
    for _, _, found in predictor.propagate_in_video(state, max_frame_num_to_track=frames - 1):
        masks.append(hashlib.sha256(found.numpy().tobytes()).hexdigest())
        sizes.append(state_bytes({name: one for name, one in state.items() if name != "images"}))
    middle = len(sizes) // 2
    return masks, (sizes[-1] - sizes[middle]) / max(len(sizes) - 1 - middle, 1)


def show(result: dict[str, Any]) -> None:
    """One figure a line."""
    for name, figure in result.items():
        print(f"{name.strip('_').replace('_', ' '):<28} {figure}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--frames", type=int, default=1000)
    parser.add_argument("--unbounded", type=int, help="frames that also run unbounded; default all")
    parser.add_argument("--kv", type=int, metavar="TOKENS")
    parser.add_argument("--full", type=int, metavar="FRAMES")
    parser.add_argument("--cleaning", action="store_true")
    parser.add_argument("--package", nargs=2, metavar=("KIND", "CHECKOUT"))
    parser.add_argument("--video", help="a folder of JPEG frames for --package")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    options = parser.parse_args()
    if options.kv:
        result = keys_and_values(options.kv)
    elif options.full:
        result = full_size(options.full)
    elif options.cleaning:
        result = cleaning()
    elif options.package:
        result = package(*options.package, options.video, options.frames)
    else:
        few = options.frames if options.unbounded is None else options.unbounded
        result = measure(options.frames, few)
    if options.json:
        print(json.dumps({name: one for name, one in result.items() if not name.startswith("_")}))
    else:
        show(result)


if __name__ == "__main__":
    main()
