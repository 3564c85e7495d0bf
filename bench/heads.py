"""The chunked loss inside real language models: whether their heads are found, and what is left of the peak.

    pip install --no-deps transformers
    python -m bench.heads [--sources DIR]

`DIR` has working trees of karpathy/nanoGPT and jingyaogong/minimind under `nanoGPT` and `minimind`, at the
commits of `bench/strangers/programs.toml`; without it those two are left as they were. Only the chunked loss
is allowed, as small as it gets, and each plan is run and certified.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tests.cases import zoo

from bench.machine import RESULTS, save, slug
from torchtrim import TrainStep
from torchtrim.executor.registry import names
from torchtrim.records.terms import Terms
from torchtrim.records.trial import Request
from torchtrim.workflows.optimize.fitting import Fitting

_VOCABULARY = 8000
_SMALL = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
_WORDS = {**_SMALL, "intermediate_size": 256, "vocab_size": _VOCABULARY}
TRANSFORMERS: dict[str, zoo.Maker] = {
    "gpt2": zoo.transformer(
        "GPT2", "CausalLM", n_embd=128, n_layer=2, n_head=4, vocab_size=_VOCABULARY
    ),
    "llama": zoo.transformer("Llama", "CausalLM", num_key_value_heads=2, **_WORDS),
    "bert": zoo.transformer("Bert", "MaskedLM", **_WORDS),
    "t5": zoo.transformer(
        "T5",
        "Seq2SeqLM",
        d_model=128,
        d_kv=32,
        d_ff=256,
        num_layers=2,
        num_heads=4,
        vocab_size=_VOCABULARY,
        decoder_start_token_id=0,
    ),
}


def _nano(sources: Path) -> zoo.Sample:
    sys.path.insert(0, str(sources / "nanoGPT"))
    module = importlib.import_module("model")
    config = module.GPTConfig(
        block_size=128, vocab_size=_VOCABULARY, n_layer=2, n_head=4, n_embd=128, dropout=0.0
    )
    tokens = torch.randint(_VOCABULARY, (2, 128))
    return zoo.Sample(module.GPT(config), tokens, lambda net, batch: net(batch, batch)[1])


def _mini(sources: Path) -> zoo.Sample:
    sys.path.insert(0, str(sources / "minimind"))
    module = importlib.import_module("model.model_minimind")
    config = module.MiniMindConfig(hidden_size=128, num_hidden_layers=2, vocab_size=_VOCABULARY)
    tokens = torch.randint(_VOCABULARY, (2, 128))
    model = module.MiniMindForCausalLM(config)
    return zoo.Sample(model, {"input_ids": tokens, "labels": tokens}, zoo.language)


def _own(make: Callable[[Path], zoo.Sample], sources: Path) -> zoo.Maker:
    def made() -> zoo.Sample:
        sys.modules.pop("model", None)
        return make(sources)

    return made


def measure(make: zoo.Maker) -> dict[str, Any]:
    """The peak before and after, where the head is, and the verdict."""
    torch.manual_seed(0)
    sample = make()
    optimizer = torch.optim.SGD(sample.model.parameters(), 1e-3)
    work = TrainStep(sample.model.train(), sample.loss, optimizer, sample.batch)
    others = tuple(name for name in names() if name != "chunked_loss")
    fit = Fitting(work, Request(steps=2), lambda _: None, Terms("ROUNDING", others)).smallest()
    assert fit.certificate is not None
    assert fit.planned is not None
    return {
        "where": [where for one in fit.plan.techniques for where in one.where],
        "original_bytes": fit.original.peak_bytes,
        "predicted_bytes": fit.plan.predicted.peak_bytes,
        "measured_bytes": fit.planned.peak_bytes,
        "verdict": fit.certificate.verdict,
    }


def main() -> None:
    """All heads; those without sources keep their results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sources", type=Path)
    sources = parser.parse_args().sources
    zoo.import_libraries()
    path = RESULTS / slug() / "heads.json"
    heads = json.loads(path.read_text())["heads"] if path.exists() else {}
    makers = dict(TRANSFORMERS)
    if sources is not None:
        makers |= {"nanogpt": _own(_nano, sources), "minimind": _own(_mini, sources)}
    for name, make in makers.items():
        heads[name] = measure(make)
        print(name, json.dumps(heads[name]), flush=True)
    save("heads", {"heads": heads})


if __name__ == "__main__":
    main()
