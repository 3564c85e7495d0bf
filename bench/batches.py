"""The largest batch that fits: ours beside Lightning's and Accelerate's, each against the measured truth.

    pip install --no-deps torchvision==0.28.0 timm
    pip install --no-deps lightning lightning-utilities torchmetrics accelerate
    python -m bench.batches [MODEL ...]

Each model has a limit between what one batch size needs and what one more does. The truth is measured on
batches of random samples: by bisection, and at each size up to a quarter above what that finds; where a
model's peak falls by design as its batch grows, at each size up to `EVERY` times the answer. The others get
these peaks, and an error as of CUDA where one is over the limit, so their searches are their own and their
steps cost nothing; see `bench/batch_rivals.py`.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from tests.cases import nets, zoo
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import torchtrim
from bench import batch_rivals
from bench.machine import RESULTS, save, slug
from torchtrim import TrainStep
from torchtrim.records.trial import Request
from torchtrim.runner.script import working_folder
from torchtrim.runner.trials import run_trial
from torchtrim.workflows.optimize.trials import measured

PROBES = 4
EVERY = 2
GIVEN = 2
_REQUEST = Request(steps=1)


class Case(NamedTuple):
    """A model, its batch of a size, its loss, and the size after which memory is to be full.

    `falls`: its peak falls somewhere as the batch grows.
    """

    model: Callable[[], nn.Module]
    batch: Callable[[int], Any]
    loss: Callable[[Any, Any], Tensor]
    answer: int
    falls: bool = False


class Rows(nn.Module):
    """A perceptron over the rows of each sample; the peak is its activations."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 10))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).mean(1)


class InParts(Rows):
    """Batches of more than 24 are gone over in parts of 8, each run again in backward."""

    def forward(self, x: Tensor) -> Tensor:
        if len(x) <= 24:
            return super().forward(x)
        run = super().forward
        return torch.cat([checkpoint(run, part, use_reentrant=False) for part in x.split(8)])


class Padded(Rows):
    """Batches are filled up to whole blocks of 8."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.pad(x, (0, 0, 0, 0, 0, -len(x) % 8)))[: len(x)]


class Workspace(Rows):
    """A workspace of the next power of two is taken, but none for whole blocks of 32."""

    def forward(self, x: Tensor) -> Tensor:
        result = super().forward(x)
        if len(x) % 32 == 0:
            return result
        workspace = torch.empty(1 << (len(x) - 1).bit_length(), 16384)
        return result + workspace.fill_(0)[: len(x), :10].detach()


def _words(length: int, vocabulary: int = 2000) -> Callable[[int], Any]:
    def batch(count: int) -> Any:
        tokens = torch.randint(3, vocabulary, (count, length))
        return {"input_ids": tokens, "labels": tokens.clone()}

    return batch


def _of_zoo(make: zoo.Maker, batch: Callable[[int], Any], answer: int) -> Case:
    loss: list[Any] = []

    def model() -> nn.Module:
        sample = make()
        loss[:] = [sample.loss]
        return sample.model

    return Case(model, batch, lambda net, given: loss[0](net, given), answer)


def _language(kind: str, task: str, length: int, answer: int, **options: Any) -> Case:
    make = zoo.transformer(kind, task, length, 1, **{"vocab_size": 2000, **options})
    return _of_zoo(make, _words(length), answer)


def _image(make: zoo.Maker, size: int, answer: int) -> Case:
    return _of_zoo(make, lambda count: zoo.images(size, count), answer)


def _vectors(count: int) -> Any:
    return torch.randn(count, 64), torch.randint(10, (count,))


def _rows(count: int) -> Any:
    return torch.randn(count, 128, 32), torch.randint(10, (count,))


_NARROW = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
_WORDS = {**_NARROW, "intermediate_size": 256}
_LLAMA = {**_WORDS, "num_key_value_heads": 2}

CASES: dict[str, Case] = {
    "u-net": Case(nets.UNet, lambda n: zoo.pixels(n, 32), zoo.classified, 37),
    "lstm": Case(
        lambda: nets.Recurrent(nn.LSTM, 64), lambda n: zoo.tokens(n, 16), zoo.next_token, 45
    ),
    "gru": Case(
        lambda: nets.Recurrent(nn.GRU, 64), lambda n: zoo.tokens(n, 16), zoo.next_token, 29
    ),
    "audio": Case(nets.Audio, lambda n: zoo.waves(n, 1000), zoo.classified, 93),
    "video": Case(nets.Video, lambda n: zoo.clips(n, 4, 24), zoo.classified, 51),
    "autoencoder": Case(nets.Autoencoder, lambda n: zoo.pixels(n, 32), zoo.rebuilt, 77),
    "encoder": Case(
        lambda: nets.Encoder(64, 2, 4000), lambda n: zoo.tokens(n, 24), zoo.next_token, 19
    ),
    "relative attention": Case(
        lambda: nets.Relative(48, 2), lambda n: zoo.images(32, n, 10), zoo.classified, 61
    ),
    "autocast encoder": Case(
        lambda: nets.Autocast(nets.Encoder(64, 2)), lambda n: zoo.tokens(n, 24), zoo.next_token, 22
    ),
    "autocast u-net": Case(
        lambda: nets.Autocast(nets.UNet()), lambda n: zoo.pixels(n, 32), zoo.classified, 35
    ),
    "perceptron": Case(
        lambda: nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 10)),
        _vectors,
        zoo.classified,
        197,
    ),
    "resnet18": _image(zoo.vision("resnet18"), 32, 21),
    "mobilenet_v2": _image(zoo.vision("mobilenet_v2"), 32, 27),
    "densenet121": _image(zoo.vision("densenet121"), 32, 9),
    "squeezenet": _image(zoo.vision("squeezenet1_1"), 64, 23),
    "shufflenet": _image(zoo.vision("shufflenet_v2_x1_0"), 32, 43),
    "efficientnet": _image(zoo.timm("efficientnet_b0"), 32, 14),
    "vit": _image(zoo.timm("vit_tiny_patch16_224", img_size=64, depth=4), 64, 25),
    "convnext": _image(zoo.timm("convnext_atto"), 32, 39),
    "mixer": _image(zoo.timm("mixer_s32_224", num_blocks=3, img_size=64), 64, 57),
    "gpt2": _language("GPT2", "CausalLM", 48, 13, n_embd=64, n_layer=2, n_head=4, n_positions=64),
    "llama": _language("Llama", "CausalLM", 48, 18, **_LLAMA),
    "qwen2": _language("Qwen2", "CausalLM", 48, 11, **_LLAMA),
    "bert": _language("Bert", "MaskedLM", 48, 26, **_WORDS),
    "t5": _language(
        "T5",
        "Seq2SeqLM",
        32,
        15,
        d_model=64,
        d_kv=16,
        d_ff=256,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
    ),
    "mamba": _language("Mamba", "CausalLM", 16, 7, hidden_size=48, num_hidden_layers=2),
    "in parts": Case(InParts, _rows, zoo.classified, 61, falls=True),
    "padded": Case(Padded, _rows, zoo.classified, 56, falls=True),
    "workspace": Case(Workspace, _rows, zoo.classified, 96, falls=True),
}


class Peaks:
    """Measured peaks of a model's step, by the size of its batch."""

    def __init__(self, case: Case) -> None:
        torch.manual_seed(0)
        self._case = case
        self._model = case.model().train()
        self.known: dict[int, int] = {}

    def step(self, size: int) -> TrainStep:
        """The step at that size."""
        optimizer = torch.optim.AdamW(self._model.parameters(), 1e-4)
        return TrainStep(self._model, self._case.loss, optimizer, self._case.batch(size))

    def at(self, size: int) -> int:
        """Run it, if it was not yet."""
        if size not in self.known:
            with working_folder() as folder:
                trial = run_trial(self.step(size), _REQUEST, folder, lambda _: None)
            self.known[size] = measured(trial, "allocated")
        return self.known[size]


def limit_of(peaks: Peaks, answer: int) -> int:
    """Two thirds of the way from what the answer needs to what one more does."""
    return peaks.at(answer) + max(peaks.at(answer + 1) - peaks.at(answer), 0) * 2 // 3


def truth(case: Case, peaks: Peaks, limit: int) -> int:
    """The largest size that fits, by measured peaks alone."""
    if case.falls:
        sizes = range(1, EVERY * case.answer + 1)
        return max((size for size in sizes if peaks.at(size) <= limit), default=0)
    low, high = GIVEN, 2 * GIVEN
    while peaks.at(high) <= limit:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if peaks.at(middle) <= limit else (low, middle)
    above = range(low + 1, low + low // 4 + 4)
    return max((size for size in above if peaks.at(size) <= limit), default=low)


def ours(peaks: Peaks, limit: int) -> dict[str, Any]:
    """What we find, in how many probes and seconds."""
    step = peaks.step(GIVEN)
    begin = time.perf_counter()
    found = torchtrim.find_batch(step, limit, probes=PROBES)
    return {
        "answer": found.largest,
        "probes": len(found.probes),
        "tried": [[one.length, one.predicted_bytes, one.peak_bytes] for one in found.probes],
        "exact": found.exact,
        "seconds": round(time.perf_counter() - begin, 1),
    }


def measure(case: Case) -> dict[str, Any]:
    """One model: the truth, and what each finds."""
    peaks = Peaks(case)
    limit = limit_of(peaks, case.answer)
    found = {"limit": limit, "falls": case.falls, "truth": truth(case, peaks, limit)}
    found["torchtrim"] = ours(peaks, limit)
    for name, search in batch_rivals.SEARCHES.items():
        found[name] = search(lambda size: peaks.at(size) <= limit)
    return found


def summary(models: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Of each: how many are exact, the most and the mean of its probes, and what it loses."""
    rows: dict[str, Any] = {"models": len(models)}
    for name in ("torchtrim", *batch_rivals.SEARCHES):
        rows[name] = _told([(one[name], one["truth"]) for one in models.values()])
    return rows


def _told(pairs: list[tuple[dict[str, Any], int]]) -> dict[str, Any]:
    probes = [row["probes"] for row, _ in pairs]
    return {
        "exact": sum(row["answer"] == right for row, right in pairs),
        "too_large": sum(row["answer"] > right for row, right in pairs),
        "smallest_share": round(min(row["answer"] / right for row, right in pairs), 3),
        "most_probes": max(probes),
        "mean_probes": round(sum(probes) / len(probes), 1),
    }


def main() -> None:
    """The named models, or all; keeps the results of the others."""
    zoo.import_libraries()
    gc.freeze()
    path = RESULTS / slug() / "batches.json"
    for name in sys.argv[1:] or CASES:
        one = measure(CASES[name])
        gc.collect()
        models = json.loads(path.read_text())["models"] if path.exists() else {}
        models[name] = one
        print(name, json.dumps(one), flush=True)
        save("batches", {"summary": summary(models), "models": models})
    gc.unfreeze()
    print(json.dumps(json.loads(path.read_text())["summary"], indent=1))


if __name__ == "__main__":
    main()
