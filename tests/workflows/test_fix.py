"""Fixes of whole scripts: applied, refused, reverted, and proved."""

from __future__ import annotations

import re
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import torchtrim
from torchtrim.records.fix import Fixes
from torchtrim.records.trial import Request
from torchtrim.rewriter.fix import Fix, Match, Writing, of_forms
from torchtrim.rewriter.replace import replace
from torchtrim.runner import trials
from torchtrim.source.facts import Facts
from torchtrim.workflows.fix import Fixing

EXAMPLES = Path(__file__).parents[2] / "examples"
BACKGROUND, IGNORE = 9, -1
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
SCRIPT = """
import torch
from torch import nn
from torch.nn import functional as F

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
model = nn.Conv2d(3, 5, 1).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
images = torch.randn(2, 3, 8, 8).to(device)
labels = torch.randint(5, (2, 8, 8)).to(device)
for _ in range(8):
    scores = model(images).permute(0, 2, 3, 1)
    mask = labels != 0
{body}
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def fixed(folder: Path, body: str, *, unsafe: bool = False) -> tuple[Fixes, str]:
    """What became of the fixes, and the text of the script afterwards."""
    path = folder / "script.py"
    path.write_text(SCRIPT.format(body="\n".join(f"    {line}" for line in body.splitlines())))
    script = torchtrim.Script(str(path), timeout=120)
    return torchtrim.fix_source(script, write=True, unsafe=unsafe), path.read_text()


def test_a_sync_is_fixed_and_proved(tmp_path: Path) -> None:
    fixes, text = fixed(tmp_path, "loss = F.cross_entropy(scores[mask], labels[mask])")
    assert [(fix.name, fix.state, fix.syncs_before, fix.syncs_after) for fix in fixes.places] == [
        ("masked_cross_entropy", "applied", 3, 0)
    ]
    assert fixes.certificate is not None
    assert fixes.certificate.verdict == "ROUNDING"
    assert ".dim()" not in text
    assert "[mask]" not in text
    assert [fix.kinds for fix in fixes.places] == ["holds for the kinds of input of the run"]
    assert fixes.written


def test_what_is_looked_at_and_what_is_proved_takes_few_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_script = trials._run_script

    def counted(script: Any, request: Any, folder: Any, progress: Any) -> Any:
        progress("begins")
        return run_script(script, request, folder, progress)

    monkeypatch.setattr(trials, "_run_script", counted)
    path = tmp_path / "script.py"
    body = "    loss = F.cross_entropy(scores[mask], labels[mask])"
    path.write_text(SCRIPT.format(body=body))
    said: list[str] = []
    fixing = Fixing(torchtrim.Script(str(path), timeout=120), Request(), said.append)
    found = fixing.fix()
    begun = [text.partition(": ")[0] for text in said if text.endswith(": begins")]
    assert begun == [
        *("original", "looking at values", "fixes, round 1"),
        *("looking closer",) * 2,
        *("looking closer, in float64",) * 3,
    ]
    assert found.certificate is not None
    assert found.certificate.verdict == "ROUNDING"


def test_a_script_that_does_not_wait_is_left_alone(tmp_path: Path) -> None:
    body = "loss = F.cross_entropy(scores.movedim(-1, 1), labels, ignore_index=0)"
    fixes, text = fixed(tmp_path, body)
    assert fixes.places == ()
    assert not fixes.written
    assert text == SCRIPT.format(body="    " + body)


def test_what_evidence_speaks_against_is_refused(tmp_path: Path) -> None:
    body = 'loss = F.cross_entropy(scores[mask], labels[mask], reduction="none").mean()'
    fixes, text = fixed(tmp_path, body)
    (fix,) = [one for one in fixes.places if one.name == "masked_cross_entropy"]
    assert fix.state == "refused"
    assert "another shape" in fix.reason
    assert body in text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (
            "F.cross_entropy(X.movedim(-1, 1), torch.where(M, Y, -100)) * 1.5",
            "still differs",
        ),
        ("F.cross_entropy(X[M.clone()], Y[M])", "as often"),
        ("F.cross_entropy(X.movedim(-1, 1), torch.where(M, Y, 77))", "the script fails"),
    ],
    ids=["another value", "still waits", "crashes"],
)
def test_a_wrong_fix_is_reverted(
    template: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(match: Match, facts: Facts) -> Writing:
        return Writing(replace(match, template))

    form = "torch.nn.functional.cross_entropy(X[M], Y[M])"
    wrong: Fix = Fix(
        codes=("TT102",), equivalence="BITWISE", find=of_forms(lambda: wrong, form), write=write
    )
    monkeypatch.setattr("torchtrim.rewriter.fix.all_fixes", lambda: (wrong,))
    body = "loss = F.cross_entropy(scores[mask], labels[mask])"
    fixes, after = fixed(tmp_path, body)
    (fix,) = fixes.places
    assert fix.state == "reverted"
    assert re.search(reason, fix.reason)
    assert body in after


def end_form(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """What the article's loss comes to: no selection, no count of another size, no branch."""
    labels.masked_fill_(labels == BACKGROUND, IGNORE)
    ordered = labels.flatten().sort().values
    classes = (ordered[1:] != ordered[:-1]).sum() + 1 - (labels == IGNORE).any().long()
    loss = torch.nn.functional.cross_entropy(scores, labels, ignore_index=IGNORE)
    return torch.where(classes < 2, 0.0 * scores.sum(), loss)


@pytest.mark.slow
def test_the_article_is_fixed_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "segmentation.py"
    before = (EXAMPLES / "segmentation.py").read_text()
    path.write_text(before)
    args = ("--batch-size", "1", "--steps", "6")
    script = torchtrim.Script(str(path), args=args, device="emulated", timeout=300)
    fixes = torchtrim.fix_source(script, write=True)
    assert fixes.syncs_after == 0
    assert fixes.certificate is not None
    assert fixes.certificate.verdict in ("BITWISE", "ROUNDING")
    assert len(path.read_text().splitlines()) <= len(before.splitlines()) + 4
    assert ".dim()" not in path.read_text()
    loss = runpy.run_path(str(path), run_name="fixed")["MaskedLoss"]()
    for seed in range(40):
        assert_equal_losses(loss, end_form, seed)


def assert_equal_losses(one: Loss, other: Loss, seed: int) -> None:
    """Losses, gradients and what becomes of the labels, with few classes, one and none."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(2, 10, 6, 5, generator=generator)
    labels = torch.randint(9 - seed % 10, 10, (2, 6, 5), generator=generator)
    found = []
    for function in (one, other):
        own, given = scores.clone().requires_grad_(), labels.clone()
        loss = function(own, given)
        loss.backward()
        found.append((loss.detach(), own.grad, given))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_a_setting_that_ends_a_wait_is_named(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    text = SCRIPT.format(body="    loss = scores.square().mean()")
    text = text.replace("for _ in", 'scaler = torch.amp.GradScaler("cuda")\nfor _ in')
    text = text.replace("loss.backward()", "scaler.scale(loss).backward()")
    path.write_text(text.replace("optimizer.step()", "scaler.step(optimizer)\n    scaler.update()"))
    found = torchtrim.diagnose(torchtrim.Script(str(path), timeout=120))
    line = path.read_text().splitlines().index("    scaler.step(optimizer)") + 1
    (fix,) = [one.fix for one in found if one.line == line]
    assert fix is not None
    assert fix.kind == "config"
    assert "torch.bfloat16" in fix.reason
