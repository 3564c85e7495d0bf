"""Meters that get a loss."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fixes import proving
from torchtrim.fixes.metered_reads import FIX

METER = """
import torch

class AverageMeter(object):
    '''The last number, and the average.'''

    def __init__(self):
        self.reset()

    def reset(self):
        self.val = 0
        self.avg = 0
        self.sum = 0
        self.count = 0

    def update(self, val, n=1):
        '''Add a number n times.'''
        self.val = val
        self.sum += val * n
        self.count += n
        self.avg = self.sum / self.count if self.count != 0 else 0

"""
LOOP = """
def function(batches, every):
    losses, seen = AverageMeter(), []
    for it, x in enumerate(batches):
        loss = x.square().mean()
        losses.update(loss.item(), len(x))
        if it % every == every - 1:
            seen.append(f"{it} {losses.val:.4f} ({losses.avg:.4f})")
            if it > 4:
                losses.reset()
    return seen, losses.avg, losses.count
"""
WRITTEN = """
def function(batches, every):
    losses, seen = AverageMeter(), []
    for it, x in enumerate(batches):
        loss = x.square().mean()
        losses.update(loss.detach().double(), len(x))
        if it % every == every - 1:
            seen.append(f"{it} {losses.val:.4f} ({losses.avg:.4f})")
            if it > 4:
                losses.reset()
    return seen, torch.as_tensor(losses.avg).item(), losses.count
"""


def make(rng: random.Random) -> Iterator[proving.Inputs]:
    dtype, graded = rng.choice((torch.float32, torch.float64, torch.bfloat16)), rng.random() < 0.5
    for draw in range(proving.DRAWS):
        sizes = [rng.randint(1, 4) for _ in range(rng.randint(0 if draw else 1, 8))]
        batches = [proving.floating(rng, (size, 3), dtype) for size in sizes]
        yield {
            "batches": [one.requires_grad_(graded) for one in batches],
            "every": rng.randint(1, 3),
        }


@pytest.mark.parametrize("update", ["loss.item(), len(x)", "val=loss.item() * 2", "float(loss)"])
@pytest.mark.parametrize("zero", ["0", "0.0"])
def test_it_is_sound(update: str, zero: str) -> None:
    code = METER.replace("= 0\n", f"= {zero}\n") + LOOP.replace("loss.item(), len(x)", update)
    assert proving.prove(FIX, code, make, structures=84).reaches(330)


def batches(number: int) -> proving.Inputs:
    return {"batches": [torch.randn(3, 4, requires_grad=True) for _ in range(number)], "every": 2}


def test_it_is_written_as_by_hand() -> None:
    text = proving.text_of(proving.fixed(FIX, METER + LOOP, batches(3)))
    assert text == METER + WRITTEN
    rewrite = proving.fixed(FIX, METER.replace("= 0\n", "= 0.0\n") + LOOP, batches(3))
    assert "return seen, float(losses.avg), losses.count" in proving.text_of(rewrite)


def test_it_waits_only_where_it_prints() -> None:
    code = METER + LOOP.replace("it % every == every - 1", "it == 5")
    inputs = {"batches": torch.randn(6, 3, 4), "every": 2}
    assert proving.syncs_go(FIX, code, inputs) == (6, 2)


def test_its_class_may_be_in_another_file(tmp_path: Path) -> None:
    (tmp_path / "meters.py").write_text(METER)
    text = f"from meters import AverageMeter\n{LOOP}"
    source = proving.SourceFile(str(tmp_path / "train.py"), text)
    assert len(list(FIX.find(source))) == 1
    (tmp_path / "meters.py").unlink()


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("        self.val = val\n", "        self.all.append(val)\n", "more with the number"),
        ("self.val = val", "self.val = round(val, 3)", "more with the number"),
        ("self.val = val", "self.val = self.sum", "under another name"),
        ("losses.reset()", "print(losses)", "to other code"),
        ("losses.reset()", "losses.update(1.0)", "calls `losses.update` too"),
        ("self.val = val", "self.val = val if val > 0 else 0", "more with the number"),
        ("loss = x.square().mean()", "loss = (x > 0).sum()", "floats"),
        ("self.val = val", "if val > 0:\n            self.val = val", "more with the number"),
    ],
)
def test_it_is_refused(old: str, new: str, why: str) -> None:
    proving.refuses(FIX, (METER + LOOP).replace(old, new), batches(3), why)


PROGRESS = """
class ProgressMeter:
    def __init__(self, count, meters, prefix=""):
        self.count, self.meters = count, []
        self.meters = meters
        self.prefix = prefix

    def display(self, batch):
        entries = [self.prefix + str(batch)]
        entries += [str(meter) for meter in self.meters]
        print(entries)

"""
TYPED = (
    METER
    + """
    def __str__(self) -> str:
        return ("{val:.4f} ({avg" + ":.4f})").format(**self.__dict__)

"""
)
SHOWN = """
def function(batches, every):
    losses: AverageMeter = AverageMeter()
    progress = ProgressMeter(len(batches), [losses], prefix="train")
    for it, x in enumerate(batches):
        loss = x.square().mean()
        losses.update(loss.item(), len(x))
        progress.display(it)
    return float(losses.avg)
"""


def test_a_class_that_formats_its_meters_may_hold_them() -> None:
    code = TYPED + PROGRESS + SHOWN
    rewrite = proving.fixed(FIX, code, batches(3))
    assert [edit.text for edit in rewrite.edits] == ["loss.detach().double()"]
    assert proving.prove(FIX, code, make, structures=20).reaches(78)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("str(meter) for", "meter.val + 1 for"),
        ("print(entries)", "print(self.meters[0].val > 1)"),
        ("print(entries)", "keep(meters=self.meters)"),
        ("self.prefix = prefix", "self.first = meters[0]"),
        ("progress.display(it)", "show(progress)"),
        (".format(**self.__dict__)", ".format(**self.__dict__) + 'x' * int(self.val > 1)"),
    ],
)
def test_a_class_that_does_more_with_its_meters_may_not(old: str, new: str) -> None:
    code = (TYPED + PROGRESS + SHOWN).replace(old, new)
    proving.refuses(FIX, code, batches(3), "gives `losses` to other code")
