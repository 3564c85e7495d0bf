"""Cures of whole scripts: made, refused, taken back, and proved."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import torchtrim
from torchtrim.records.fix import Cures
from torchtrim.rewrite import registry
from torchtrim.rewrite.base import Cure, Match, Writing, of_forms
from torchtrim.rewrite.facts import Facts
from torchtrim.rewrite.writing import replace

EXAMPLES = Path(__file__).parents[2] / "examples"
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


def cured(folder: Path, body: str, *, unsafe: bool = False) -> tuple[Cures, str]:
    """What became of the cures, and the text of the script afterwards."""
    path = folder / "script.py"
    path.write_text(SCRIPT.format(body="\n".join(f"    {line}" for line in body.splitlines())))
    script = torchtrim.Script(str(path), timeout=120)
    return torchtrim.cure(script, write=True, unsafe=unsafe), path.read_text()


def test_a_wait_is_cured_and_proved(tmp_path: Path) -> None:
    cures, text = cured(tmp_path, "loss = F.cross_entropy(scores[mask], labels[mask])")
    assert [(fix.cure, fix.state, fix.waits_before, fix.waits_after) for fix in cures.fixes] == [
        ("masked_cross_entropy", "made", 3, 0)
    ]
    assert cures.certificate is not None
    assert cures.certificate.verdict == "ROUNDING"
    assert "scores[mask]" not in text
    assert cures.written


def test_a_script_that_does_not_wait_is_left_alone(tmp_path: Path) -> None:
    body = "loss = F.cross_entropy(scores.movedim(-1, 1), labels, ignore_index=0)"
    cures, text = cured(tmp_path, body)
    assert cures.fixes == ()
    assert not cures.written
    assert text == SCRIPT.format(body="    " + body)


def test_what_evidence_speaks_against_is_refused(tmp_path: Path) -> None:
    body = 'loss = F.cross_entropy(scores[mask], labels[mask], reduction="none").mean()'
    cures, text = cured(tmp_path, body)
    (fix,) = [one for one in cures.fixes if one.cure == "masked_cross_entropy"]
    assert fix.state == "refused"
    assert "another shape" in fix.reason
    assert body in text


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("F.cross_entropy(X.movedim(-1, 1), torch.where(M, Y, -100)) * 1.5", "too large|does not"),
        ("F.cross_entropy(X[M.clone()], Y[M])", "as often"),
        ("F.cross_entropy(X.movedim(-1, 1), torch.where(M, Y, 77))", "the script fails"),
    ],
    ids=["another value", "still waits", "crashes"],
)
def test_a_wrong_cure_is_taken_back(
    template: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(match: Match, facts: Facts) -> Writing:
        return Writing(replace(match, template))

    form = "torch.nn.functional.cross_entropy(X[M], Y[M])"
    wrong: Cure = Cure(
        codes=("TT102",), equivalence="BITWISE", find=of_forms(lambda: wrong, form), write=write
    )
    monkeypatch.setattr(registry, "all_cures", lambda: (wrong,))
    body = "loss = F.cross_entropy(scores[mask], labels[mask])"
    cures, after = cured(tmp_path, body)
    (fix,) = cures.fixes
    assert fix.state == "taken back"
    assert re.search(reason, fix.reason)
    assert body in after


def test_the_article_is_cured_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "segmentation.py"
    path.write_text((EXAMPLES / "segmentation.py").read_text())
    script = torchtrim.Script(
        str(path), args=("--batch-size", "1", "--steps", "6"), device="emulated", timeout=300
    )
    cures = torchtrim.cure(script, write=True)
    assert cures.certificate is not None
    assert cures.certificate.verdict in ("BITWISE", "ROUNDING")
    body = re.search(
        r"def forward\(self, scores, labels\):\n(.*?)\n\n", path.read_text(), re.DOTALL
    )
    assert body is not None
    waits = [found for found in torchtrim.diagnose(script) if found.code.startswith("TT10")]
    assert {found.code for found in waits} == {"TT103"}
    first = path.read_text().splitlines().index("class MaskedLoss(nn.Module):")
    assert not [found for found in waits if first < found.line <= first + 12]
