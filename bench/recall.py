"""How many of the host-device syncs inside a library `lint` finds, beside what its models do when they run.

    python -m bench.recall [--models 80] [--seed 0] [--libraries [NAME ...]] [--misses] [--json]

Needs transformers, or with `--libraries` those of `bench/recall_libraries.py`, whose steps run in place of
models; results of libraries that are not named stay. Models of its language tasks, drawn at random and made
small by their configuration, run once on an emulated device, forward and backward. Each line of the library
at which the host waited then is a sync that is there; `lint` reads the source of the same files and has seen
none of that. A model that does not run so small, or at all without its extra packages, is left out.
"""

from __future__ import annotations

import argparse
import random
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import torchtrim
from bench.lint import folder_of
from bench.machine import save, saved
from bench.recall_libraries import LIBRARIES, UNSEEN
from torchtrim.linter.text import lint_text
from torchtrim.source.source import read_source
from torchtrim.syncs.lookup import row

_CODES = ("TT101", "TT102", "TT103", "TT104")
_SMALL = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embedding_size", "emb_dim"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads",), 2),
    **dict.fromkeys(("head_dim", "d_kv"), 8),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "hidden_dim", "n_inner"), 64),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "moe_intermediate_size"), 64),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token"), 2),
    **dict.fromkeys(("vocab_size",), 99),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), 64),
}
_LOW = {"pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 3, "decoder_start_token_id": 2}
_MOST = 20_000_000
Line = tuple[str, int]


def names(count: int, seed: int) -> list[str]:
    """Model classes of language tasks, at random."""
    from transformers.models.auto import modeling_auto as auto

    found = {
        name
        for mapping in (
            auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
            auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
            auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        )
        for name in mapping.values()
        if isinstance(name, str)
    }
    ordered = sorted(found)
    return random.Random(seed).sample(ordered, min(count, len(ordered)))


def small(model_name: str) -> Any:
    """A small model of a class. Raises whatever its constructor does, `ValueError` where it stays large."""
    import transformers

    kind = getattr(transformers, model_name)
    config = small_config(kind.config_class)
    with torch.device("meta"):
        size = sum(one.numel() for one in kind(config).parameters())
    if size > _MOST:
        raise ValueError(f"{size:,} parameters")
    torch.manual_seed(0)
    return kind(config)


def small_config(kind: Any) -> Any:
    """A configuration with all that makes it large made small, in those within it too."""
    default = kind()
    words = {name: value for name, value in (_SMALL | _LOW).items() if hasattr(default, name)}
    if getattr(default, "layer_types", None):
        words["layer_types"] = list(default.layer_types)[:2]
    inner = {name: small_config(one) for name, one in kind.sub_configs.items() if _is_kind(one)}
    return kind(**words, **inner)


def _is_kind(one: Any) -> bool:
    return isinstance(getattr(one, "sub_configs", None), dict) and one.__name__ != "AutoConfig"


def waited(model: Any, project: Path) -> set[Line]:
    """The lines of the library at which a step on an emulated device waits."""
    ids = torch.randint(4, 90, (2, 16))
    inputs: dict[str, Any] = {}

    def step() -> None:
        if not inputs:
            model.to("cuda")
            on_device = ids.to("cuda")
            inputs.update(
                input_ids=on_device, labels=on_device, attention_mask=torch.ones_like(on_device)
            )
        model(**inputs).loss.backward()

    return lines_of(step, project)


def lines_of(step: Callable[[], object], project: Path) -> set[Line]:
    """The lines of a library at which the second of two calls waits on an emulated device."""
    with torchtrim.emulate():
        measured = torchtrim.measure(step, project=project, warmup=1)
    return {
        (path, line)
        for path, line, _, name, _ in measured.waits
        if line and row(name).code in _CODES
    }


def told(folder: Path, paths: set[str]) -> dict[str, list[tuple[int, int]]]:
    """First and last lines of lint's findings in each file."""
    found = {}
    for path in paths:
        name = str(folder / path)
        text = read_source(Path(name))[0]
        found[path] = [(one.line, one.end_line) for one in lint_text(name, text)]
    return found


def measure(count: int, seed: int) -> tuple[dict[str, Any], list[str]]:
    """What ran, how many lines waited, how many of those are found; and those that are not."""
    folder = folder_of("transformers")
    steps = ((name, partial(_small_waited, name, folder)) for name in names(count, seed))
    lines, ran = _all_lines(steps)
    found, missed = _beside_lint(folder, lines)
    return {"models": ran, "drawn": count, "seed": seed, **found}, missed


def _small_waited(name: str, folder: Path) -> set[Line]:
    return waited(small(name), folder)


def measure_library(library: str) -> tuple[dict[str, Any], list[str]]:
    """The same of a library, beside those saved before, and of all together."""
    results: dict[str, Any] = dict(saved("recall-libraries").get("libraries", {}))
    steps, folder = LIBRARIES[library], folder_of(library)
    lines, ran = _all_lines((name, partial(lines_of, step, folder)) for name, step in steps())
    lines = {one: name for one, name in lines.items() if Path(one[0]).is_relative_to(folder)}
    found, missed = _beside_lint(folder, lines)
    results[library] = {"version": version(library), "steps": ran, **found}
    unseen = {name: one for name, one in results.items() if name in UNSEEN}
    return {"libraries": results, "unseen": _total(unseen), **_total(results)}, missed


def _total(results: dict[str, Any]) -> dict[str, float]:
    lines, found = (
        sum(one[key] for one in results.values()) for key in ("lines_that_waited", "found")
    )
    return {"lines_that_waited": lines, "found": found, "recall": round(found / max(1, lines), 3)}


def _all_lines(
    steps: Iterable[tuple[str, Callable[[], set[Line]]]],
) -> tuple[dict[Line, str], int]:
    """The lines at which any of some steps waits, with the first that does; and how many steps ran."""
    lines: dict[Line, str] = {}
    ran = 0
    for name, step in steps:
        try:
            seen = step()
        except Exception as error:  # whatever a step may lack
            print(f"{name}: {type(error).__name__} {str(error)[:80]}", flush=True)
            continue
        ran += 1
        print(f"{name}: {len(seen)} lines", flush=True)
        lines |= {one: name for one in seen if one not in lines}
    return lines, ran


def _beside_lint(folder: Path, lines: dict[Line, str]) -> tuple[dict[str, Any], list[str]]:
    findings = told(folder, {path for path, _ in lines})
    missed = [
        f"{path}:{line} ({name})"
        for (path, line), name in sorted(lines.items())
        if not any(first <= line <= last for first, last in findings[path])
    ]
    found = len(lines) - len(missed)
    return {
        "lines_that_waited": len(lines),
        "found": found,
        "recall": round(found / max(1, len(lines)), 3),
    }, missed


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=int, default=80)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--libraries", nargs="*", help="steps of other libraries")
    parser.add_argument("--misses", action="store_true", help="name the lines that were not found")
    parser.add_argument(
        "--json",
        action="store_true",
        help="write bench/results/MACHINE/recall*.json",
    )
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.libraries is None:
        _tell(options, "recall", *measure(options.models, options.seed))
        return
    for library in options.libraries or LIBRARIES:
        _tell(options, "recall-libraries", *measure_library(library))


def _tell(
    options: argparse.Namespace, name: str, result: dict[str, Any], missed: list[str]
) -> None:
    print(result)
    if options.misses:
        print(*missed, sep="\n", flush=True)
    if options.json:
        print(save(name, result))


if __name__ == "__main__":
    main()
