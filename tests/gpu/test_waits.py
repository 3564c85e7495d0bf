"""On a GPU: what is emulated waits as often, and takes as many bytes, as what is real."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from bench.syncs import is_counted
from tests.cases.corpus import Snippet, snippets
from torch import nn
from torch.nn.functional import cross_entropy

from torchtrim.capture.recording import record_call

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("snippet", snippets(), ids=lambda one: one.name)
def test_the_corpus_on_the_device(snippet: Snippet) -> None:
    body = snippet.setup()
    body()
    waits = sum(not sync.row.startswith("async") for sync in record_call(snippet.setup()).syncs)
    assert is_counted(snippet, waits), waits


def _encoder() -> Callable[[], object]:
    layer = nn.TransformerEncoderLayer(128, 4, 512, batch_first=True)
    return _training(nn.TransformerEncoder(layer, 4), torch.randn(16, 64, 128))


def _perceptron() -> Callable[[], object]:
    blocks = [nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.LayerNorm(512)) for _ in range(8)]
    return _training(nn.Sequential(*blocks), torch.randn(256, 512))


def _training(model: nn.Module, batch: torch.Tensor) -> Callable[[], object]:
    def step() -> None:
        live = model.cuda()
        optimizer = torch.optim.AdamW(live.parameters())
        output = live(batch.cuda()).flatten(0, -2)
        cross_entropy(output, torch.zeros(len(output), dtype=torch.int64, device="cuda")).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@pytest.mark.parametrize("make", [_encoder, _perceptron])
def test_modelled_peaks_are_near_the_device_s(make: Callable[[], Callable[[], object]]) -> None:
    torch.manual_seed(0)
    real = record_call(make(), warmup=1, device="cuda")
    emulated = record_call(make(), warmup=1, device="emulated")
    assert emulated.peak_bytes == pytest.approx(real.peak_bytes, rel=0.1)
