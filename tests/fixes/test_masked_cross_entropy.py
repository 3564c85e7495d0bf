"""`cross_entropy(scores[mask], labels[mask])`."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from fixes import proving
from torchtrim.fixes.masked_cross_entropy import FIX
from torchtrim.rewriter.edits import patch
from torchtrim.source.facts import Facts, Refused
from torchtrim.source.source import Source

HEAD = (
    "import torch\nimport torch.nn.functional as F\ndef function(scores, labels, mask, weight):\n"
)
CLASSES = 4


def code_of(body: str) -> str:
    return HEAD + "".join(f"    {line}\n" for line in body.splitlines())


def make(rng: random.Random) -> Iterator[proving.Inputs]:
    """Scores that are NaN or infinite, and labels out of range, wherever the mask does not select."""
    size = proving.shape(rng)
    dtype = rng.choice((torch.float32, torch.float64, torch.bfloat16))
    for _ in range(proving.DRAWS):
        mask = proving.mask(rng, size)
        odd = rng.choice((float("nan"), float("inf"), float("-inf"), 0.0))
        scores = proving.floating(rng, (*size, CLASSES), dtype).masked_fill_(~mask[..., None], odd)
        labels = proving.integral(rng, size, torch.int64, 0, CLASSES).masked_fill_(~mask, 77)
        if rng.random() < 0.3:
            labels = torch.where(mask & (labels == 0), -100, labels)
        yield {
            "scores": scores.requires_grad_(),
            "labels": labels,
            "mask": mask,
            "weight": torch.linspace(0.5, 2, CLASSES, dtype=dtype),
        }


BODIES = [
    "return F.cross_entropy(scores[mask], labels[mask])",
    "return {'loss': 2 * F.cross_entropy(\n    scores[labels != 77],  # those that count\n"
    "    labels[labels != 77], weight=weight, label_smoothing=0.1)}",
    "s = scores[mask]\nwanted = labels[mask]  # by name\nreturn F.cross_entropy(s, wanted, reduction='sum')",
    "return F.nll_loss(scores[mask], labels[mask], weight=weight)",
    "picked = scores[mask]\nreturn F.cross_entropy(picked.double(), labels[mask].long(), ignore_index=0)",
]


@pytest.mark.parametrize("body", BODIES)
def test_it_is_sound(body: str) -> None:
    proof = proving.prove(FIX, code_of(body), make, structures=55)
    assert proof.reaches(200), proof
    assert not proof.unsafe


def inputs(**others: object) -> proving.Inputs:
    found = {
        "scores": torch.randn(3, CLASSES, requires_grad=True),
        "labels": torch.tensor([0, 1, 2]),
        "mask": torch.tensor([True, False, True]),
        "weight": torch.ones(CLASSES),
    }
    return {**found, **others}


def test_what_is_written_keeps_names_and_comments() -> None:
    body = "s = scores[mask > 0]\nt = labels[mask > 0]  # wanted\nreturn F.cross_entropy(s, t)"
    rewrite = proving.fixed(FIX, code_of(body), inputs())
    assert patch(rewrite.match.source, [rewrite]).text.removeprefix(HEAD) == (
        "    if (scores.dim(), labels.dim(), mask.dim()) == (2, 1, 1) "
        "and scores.dtype == torch.float32 and labels.dtype == torch.int64:\n"
        "        kept = mask > 0\n        s = scores.masked_fill(~kept.unsqueeze(-1), 0)\n"
        "        t = torch.where(kept, labels, -100)\n    else:\n"
        "        s = scores[mask > 0]\n        t = labels[mask > 0]  # wanted\n"
        "    return F.cross_entropy(s, t)\n"
    )
    assert rewrite.match.lines == (4, 6)


@pytest.mark.parametrize(
    ("words", "others", "why"),
    [
        (", reduction='none'", {}, "another shape"),
        (", size_average=False", {}, "say `reduction`"),
        (", ignore_index=int('3')", {}, "Give it a name first"),
        ("", {"labels": torch.ones(3, CLASSES)}, "a mask of the shape of"),
        ("", {"mask": torch.tensor([0, 2])}, "a mask of the shape of"),
        ("", {"labels": torch.tensor([0, 1, 2], dtype=torch.uint8)}, "class numbers"),
    ],
)
def test_refused(words: str, others: proving.Inputs, why: str) -> None:
    code = code_of(f"return F.cross_entropy(scores[mask], labels[mask]{words})")
    with pytest.raises(Refused, match=why):
        proving.fixed(FIX, code, inputs(**others))


@pytest.mark.parametrize(
    "body",
    [
        "return F.cross_entropy(scores[mask], labels[~mask])",
        "s = scores[mask]\nmask = ~mask\nreturn F.cross_entropy(s, labels[mask])",
        "s = scores[mask]\nprint(s)\nreturn F.cross_entropy(s, labels[mask])",
        "return F.cross_entropy(scores, labels[mask])",
    ],
)
def test_not_its_business(body: str) -> None:
    assert not list(FIX.find(Source("case.py", code_of(body))))


def test_without_evidence_it_is_not_safe() -> None:
    (match,) = FIX.find(Source("case.py", code_of(BODIES[0])))
    assert len(FIX.rewrite(match, Facts()).open_needs) == 3


@pytest.mark.parametrize("body", [BODIES[0], BODIES[2]])
def test_it_waits_no_more(body: str) -> None:
    before, after = proving.syncs_go(FIX, code_of(body), inputs())
    assert before == 3
    assert after == 0
