"""Attention with relative positions on q, k and v, against the published way and two others.

    python -m bench.irpe [--json] [--save] [--rounds N] [--keys | --all]

By default with all three tables and a batch of 2; `--keys` with that on keys alone, the published default,
and batches of 8 and 32; `--all` both. `original` does what the published code does, with its L x L tensors;
`gather` is the same with `gather` and `scatter_add`; `none` is torch's attention without positions. Each
round takes the ways in another order; a ratio is of one round, and its spread is half of what the middle
half spans. Times are those of the processor in the thread that computes, the only one. H 6, D 64, float32,
product method with 49 buckets, tables shared by heads.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.machine import RESULTS, facts, save, slug, with_spread
from torchtrim.attention import Buckets, relative_attention

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from attention import reference

HEADS, DIM = 6, 64
THREE, KEYS = ("q_table", "k_table", "v_table"), ("k_table",)
LEAST_SECONDS = 0.02
GOALS = {8: (2.0, 2.5), 14: (8.0, 5.0), 16: (6.0, 4.0), 32: (10.0, 7.0)}
DOCUMENT = {8: (0.25, 0.52), 16: (0.44, 6.67), 32: (9.55, 105.5)}
KEYS_GOAL = 1.3
_FIELD = {"three": "shapes", "keys": "keys_alone"}
Way = Callable[[], Tensor]


class Case(NamedTuple):
    """What is attended: a grid of `size` by `size`, and the tables that there are."""

    size: int
    batch: int
    tables: tuple[str, ...]


CASES = {
    "three": [Case(size, 2, THREE) for size in (8, 14, 16, 32)],
    "keys": [Case(size, batch, KEYS) for batch in (8, 32) for size in (7, 14, 16, 32)],
}


class Inputs:
    """Leaves of one shape, and the ways to attend in them."""

    def __init__(self, case: Case) -> None:
        torch.manual_seed(0)
        size = case.size
        self.buckets = Buckets.of_ratio("product", size, size)
        ids, number = self.buckets.ids(), self.buckets.number
        tokens = (case.batch, HEADS, size * size, DIM)
        q, k, v = (torch.randn(tokens, requires_grad=True) for _ in range(3))
        shapes = ((1, DIM, number), (1, DIM, number), (1, number, DIM))
        named = {
            name: (0.1 * torch.randn(shape)).requires_grad_()
            for name, shape in zip(THREE, shapes, strict=True)
            if name in case.tables
        }
        tables = [named.get(name) for name in THREE]
        self.leaves, self.slope = [q, k, v, *named.values()], torch.randn(tokens)
        self.ways: dict[str, Way] = {
            "ours": lambda: relative_attention(q, k, v, buckets=self.buckets, **named),  # type: ignore[arg-type]
            "pure": lambda: relative_attention(
                q,
                k,
                v,
                buckets=self.buckets,
                path="pure",
                **named,  # type: ignore[arg-type]
            ),
            "original": lambda: reference.original(q, k, v, ids, *tables),
            "gather": lambda: reference.gathered(q, k, v, ids, *tables),
            "none": lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v),
        }

    def forward(self, way: Way) -> None:
        """Without gradients."""
        with torch.no_grad():
            way()

    def both(self, way: Way) -> None:
        """Forward and backward."""
        for leaf in self.leaves:
            leaf.grad = None
        way().backward(self.slope)


def milliseconds(run: Callable[[], None]) -> float:
    """Of one call, of as many as last long enough to be timed."""
    calls, begin = 0, time.thread_time()
    while time.thread_time() - begin < LEAST_SECONDS or not calls:
        run()
        calls += 1
    return (time.thread_time() - begin) / calls * 1e3


def saved_bytes(way: Way) -> int:
    """What autograd keeps for the backward, each storage once."""
    kept: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        way()
    return sum(kept.values())


def measure(case: Case, rounds: int) -> dict[str, Any]:
    """All ways of one case."""
    inputs = Inputs(case)
    kinds = {"forward": inputs.forward, "forward_backward": inputs.both}
    seen: dict[str, dict[str, list[float]]] = {kind: {} for kind in kinds}
    for way in inputs.ways.values():
        inputs.both(way)
    for _ in range(rounds):
        names = random.sample(list(inputs.ways), len(inputs.ways))
        for kind, run in kinds.items():
            for name in names:
                took = milliseconds(lambda run=run, name=name: run(inputs.ways[name]))
                seen[kind].setdefault(name, []).append(took)
    result: dict[str, Any] = {"shape": f"{case.size}x{case.size}", "batch": case.batch}
    for kind, ways in seen.items():
        result[kind] = {
            "ms": {name: round(statistics.median(took), 3) for name, took in ways.items()},
            "times_faster_than": {
                name: with_spread([b / a for a, b in zip(ways["ours"], took, strict=True)])
                for name, took in ways.items()
                if name != "ours"
            },
        }
    result["saved_bytes"] = {name: saved_bytes(way) for name, way in inputs.ways.items()}
    goals = GOALS[case.size] if case.tables == THREE else (KEYS_GOAL, KEYS_GOAL)
    result["goals_over_original"] = dict(zip(kinds, goals, strict=True))
    if case.tables == THREE and case.size in DOCUMENT:
        result["document_ms"] = dict(zip(("compiled", "plain"), DOCUMENT[case.size], strict=True))
    return result


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument("--save", action="store_true", help="keep it in bench/results")
    parser.add_argument("--rounds", type=int, default=7)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--keys", action="store_true", help="with a table on keys alone")
    which.add_argument("--all", action="store_true", help="both")
    options = parser.parse_args()
    torch.set_num_threads(1)
    wanted = [*CASES] if options.all else ["keys" if options.keys else "three"]
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in wanted}
    for name in wanted:
        for case in CASES[name]:
            found[name].append(measure(case, _rounds(case, options.rounds)))
            if not options.json:
                show(found[name][-1:])
    if options.save:
        kept = RESULTS / slug() / "irpe.json"
        before = json.loads(kept.read_text()) if kept.exists() else {}
        before.pop("machine", None)
        save("irpe", before | {_FIELD[name]: shapes for name, shapes in found.items()})
    if options.json:
        print(json.dumps({"machine": facts(), **found}, indent=1))


def _rounds(case: Case, rounds: int) -> int:
    """Fewer of what takes seconds."""
    return max(3, rounds // 2) if case.size == 32 else rounds


def show(shapes: list[dict[str, Any]]) -> None:
    """A line for each shape and kind; the document's figures are of one operator on its GPU."""
    for one in shapes:
        for kind in ("forward", "forward_backward"):
            ms, ratios = one[kind]["ms"], one[kind]["times_faster_than"]
            over = {
                name: f"{ratio['median']}x +-{ratio['spread']}" for name, ratio in ratios.items()
            }
            print(f"{one['shape']:>6} x{one['batch']:<3} {kind:<17} ours {ms['ours']:>9} ms", over)
        mebibytes = {name: round(size / 2**20, 1) for name, size in one["saved_bytes"].items()}
        print(f"{'':>6} saved for backward, MiB {mebibytes}")
        if "document_ms" in one:
            print(f"{'':>6} the document's operator on its GPU, ms {one['document_ms']}")


if __name__ == "__main__":
    main()
