"""Faults drawn from real bugs: each is caught within three steps, and nine of ten are named."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from bench import faults
from bench.machine import RESULTS
from torch import nn
from torch.nn import functional as F

import draws
import torchtrim
from torchtrim.records.certificate import Certificate

ALL = list(faults.faults())


def test_each_has_a_source_and_a_place_in_its_program() -> None:
    assert len(ALL) >= 60
    for fault in ALL:
        assert fault.source.startswith("https://")
        right, wrong = fault.texts
        assert right != wrong


def test_the_table_in_the_documentation_is_that_of_the_last_run() -> None:
    found = json.loads((RESULTS / "intel-r-xeon-r-processor-2-cores" / "faults.json").read_text())
    assert {one["name"] for one in found["faults"]} == {one.name for one in ALL}
    figures = found["figures"]
    assert figures == faults.table({one["name"]: one for one in found["faults"]})
    page = (RESULTS.parent.parent / "docs" / "certificates.md").read_text()
    (every,) = re.findall(r"\| method \| catches, of (\d+) \|", page)
    rows = re.findall(r"^\| (.+) \| (\d+) \|$", page, re.MULTILINE)
    named = ("certificate", "assert_close on the loss", "loss curve at 1e-4", "an exception")
    assert [int(count) for _, count in rows] == [
        *(figures[name] for name in named),
        figures["checkpoint's determinism check"],
    ]
    assert int(every) == figures["faults"] == figures["certificate"]
    assert f"setting or input in {figures['named']}." in page


@pytest.mark.slow
def test_some_are_caught() -> None:
    for fault in random.Random(draws.seed()).sample(ALL, 2):
        assert faults.try_fault(fault).certificate.verdict == "NOT EQUAL", fault.name


@pytest.mark.slow
def test_all_are_caught_and_most_are_named() -> None:
    found = [faults.try_fault(fault) for fault in ALL]
    missed = [one.fault.name for one in found if one.certificate.verdict != "NOT EQUAL"]
    assert not missed
    assert sum(one.named for one in found) >= 0.9 * len(found)


Loss = Callable[[nn.Module, Any], torch.Tensor]


class Net(nn.Module):
    """A convolution whose bias has no gradient but rounding, since a norm follows; attention; dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.qkv, self.drop, self.head = nn.Linear(8, 24), nn.Dropout(0.1), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.normed(self.conv(x))).flatten(2).transpose(1, 2)
        x = x + self.attended(*self.projected(x).chunk(3, -1))
        result: torch.Tensor = 30 * self.head(self.pooled(self.drop(x)))
        return result

    def normed(self, x: torch.Tensor, eps: float = 1e-5) -> torch.Tensor:
        norm = self.norm
        return F.batch_norm(
            x, norm.running_mean, norm.running_var, norm.weight, norm.bias, True, 0.1, eps
        )

    def projected(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.qkv.weight, self.qkv.bias)

    def attended(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v)

    def pooled(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(1)


class OtherEps(Net):
    """Another number in the norm, by a fiftieth of it: less goes under in float32 on some processors."""

    def normed(self, x: torch.Tensor, eps: float = 1e-5) -> torch.Tensor:
        return super().normed(x, 1.02e-5)


class WithoutTail(Net):
    """A term of a sum is dropped that is small."""

    def pooled(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(1) + 1e-7 * x[:, 0]


class Chunked(Net):
    """The projection in parts."""

    def projected(self, x: torch.Tensor) -> torch.Tensor:
        pairs = zip(self.qkv.weight.chunk(4), self.qkv.bias.chunk(4), strict=True)
        return torch.cat([F.linear(x, weight, bias) for weight, bias in pairs], -1)


class Unfused(Net):
    """Attention by hand."""

    def attended(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return (q @ k.transpose(1, 2) / 8**0.5).softmax(-1) @ v


class Reassociated(Net):
    """The mean summed from the other end, in two parts."""

    def pooled(self, x: torch.Tensor) -> torch.Tensor:
        half = x.shape[1] // 2
        return (x[:, half:].flip(1).sum(1) + x[:, :half].sum(1)) / x.shape[1]


def step_of(loss: Loss, kind: type[Net] = Net) -> torchtrim.TrainStep:
    """A step of AdamW. Of another kind of network alone what it computes differs."""
    torch.manual_seed(0)
    model = kind()
    kind.__qualname__ = kind.__name__ = "Net"
    adam = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = torch.randn(8, 3, 6, 6), torch.randint(5, (8,))
    return torchtrim.TrainStep(model, loss, adam, batch)


def smoothed(by: float) -> Loss:
    return lambda net, batch: F.cross_entropy(net(batch[0]), batch[1], label_smoothing=by)


plain = smoothed(0.0)


def scaled(net: nn.Module, batch: Any) -> torch.Tensor:
    return plain(net, batch) * (1 + 1e-7)


def decayed(net: nn.Module, batch: Any) -> torch.Tensor:
    return plain(net, batch) + 1e-8 * sum(one.square().sum() for one in net.parameters())


def summed_apart(net: nn.Module, batch: Any) -> torch.Tensor:
    losses = F.cross_entropy(net(batch[0]), batch[1], reduction="none")
    return (losses[::2].sum() + losses[1::2].sum()) / len(losses)


def certified(loss: Loss = plain, kind: type[Net] = Net) -> Certificate:
    """Of a step beside the plain one."""
    return torchtrim.verify(step_of(plain), step_of(loss, kind), steps=1)


@pytest.mark.parametrize("by", [1e-4, 1e-5, 1e-6, 1e-8])
@pytest.mark.slow
def test_labels_smoothed_a_little_are_no_rounding(by: float) -> None:
    assert certified(smoothed(by)).verdict == "NOT EQUAL"


@pytest.mark.parametrize(
    ("loss", "kind"), [(scaled, Net), (decayed, Net), (plain, OtherEps), (plain, WithoutTail)]
)
@pytest.mark.slow
def test_other_small_faults_are_none(loss: Loss, kind: type[Net]) -> None:
    found = certified(loss, kind)
    assert found.verdict == "NOT EQUAL"
    assert "float64" in found.reason


@pytest.mark.parametrize(
    ("loss", "kind"),
    [(summed_apart, Net), (plain, Chunked), (plain, Unfused), (plain, Reassociated)],
)
@pytest.mark.slow
def test_what_is_summed_otherwise_is_rounding(loss: Loss, kind: type[Net]) -> None:
    found = certified(loss, kind)
    assert found.verdict == "ROUNDING", found.reason
