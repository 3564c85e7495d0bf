"""Trackers as they are used, bounded and not: random sequences of operations, and one at its full size.

    python -m bench.trackers [--sequences 1000] [--full FRAMES] [--json]

Needs transformers. A sequence adds objects, clicks again, removes them, numbers them anew, propagates both
ways and resets, on a small model with random weights; then its session is reset and tracks one object: what
it holds must be what a new session holds. `--full` runs Sam2VideoModel at its default size, 1024 x 1024, with
random weights, bounded and unbounded.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from bench.machine import save, saved
from torchtrim.stream import bound_session
from torchtrim.stream.storages import state_bytes

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from stream import sequences, tiny

_SIDE = 1024
_LAST: list[sequences.Step] = [
    ("reset",),
    ("click", 0, 99, (20, 24)),
    ("propagate", [0, 1, 2], False),
]
_READ = 16


def _bound(session: Any, model: Any) -> Any:
    return bound_session(session, model, corrections=sequences.FRAMES)


def of_sequences(count: int, family: str) -> dict[str, Any]:
    """So many sequences on a small model: how many have equal masks, how many leave nothing."""
    model = tiny.tracker(family)
    alone = sequences.run(model, _LAST, _bound).bytes[-1]
    equal = empty = masks = 0
    done: Counter[str] = Counter()
    begin = time.process_time()
    for number in range(count):
        sequence = sequences.steps(number) + _LAST
        done.update(step[0] for step in sequence)
        want, got = sequences.run(model, sequence), sequences.run(model, sequence, _bound)
        equal += [*map(tiny.digest, want.masks)] == [*map(tiny.digest, got.masks)]
        empty += got.bytes[-1] == alone
        masks += len(got.masks)
    return {
        "sequences": count,
        "masks_equal": equal,
        "growth_0": empty,
        "masks": masks,
        "operations": dict(done),
        "processor_seconds": round(time.process_time() - begin),
    }


@torch.no_grad()
def full_size(frames: int) -> dict[str, Any]:
    """One object through a stream at the default size, bounded and unbounded beside each other."""
    import transformers

    torch.manual_seed(0)
    model = transformers.Sam2VideoModel(transformers.Sam2VideoConfig()).eval()
    model.mask_decoder.pred_obj_score_head.proj_out.bias.fill_(50.0)
    tied, free = tiny.session(model), tiny.session(model)
    bound = bound_session(tied, model)
    for one in (tied, free):
        tiny.prompt(one, 0, at=(300, 400))
    equal, digests, sizes, without = True, set(), [], []
    for frame in range(frames):
        image = torch.randn(1, 3, _SIDE, _SIDE, generator=torch.Generator().manual_seed(frame))
        masks = tiny.digest(model(tied, frame=image).pred_masks)
        equal = equal and masks == tiny.digest(model(free, frame=image).pred_masks)
        digests.add(masks)
        sizes.append(bound.bytes)
        without.append(state_bytes(free))
        print(frame, sizes[-1], without[-1], equal, flush=True)
    return {
        "frames": frames,
        "parameters": sum(one.numel() for one in model.parameters()),
        "masks_equal": equal,
        "masks_differ_from_frame_to_frame": len(digests),
        "bounded_bytes": sizes[-1],
        "growth_bytes": sizes[-1] - sizes[min(_READ + 1, frames - 1)],
        "unbounded_bytes": without[-1],
        "unbounded_growth_a_frame": without[-1] - without[-2],
    }


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sequences", type=int, default=1000)
    parser.add_argument("--full", type=int, default=0, metavar="FRAMES")
    parser.add_argument(
        "--json",
        action="store_true",
        help="write bench/results/MACHINE/trackers.json, and keep the rest",
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    result: dict[str, Any] = {}
    for family in tiny.FAMILIES if options.sequences else ():
        count = options.sequences if family == "Sam2Video" else options.sequences // 10
        result[family] = of_sequences(count, family)
        print(family, result[family], flush=True)
    if options.full:
        result["full size"] = full_size(options.full)
        print(result["full size"])
    if options.json:
        before = saved("trackers")
        before.pop("machine", None)
        print(save("trackers", before | result))


if __name__ == "__main__":
    main()
