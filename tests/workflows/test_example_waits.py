"""Where the examples wait on an emulated device: every site, by its line."""

from __future__ import annotations

from pathlib import Path

import pytest

import torchtrim
from torchtrim.analysis.syncs import CODES

EXAMPLES = Path(__file__).parents[2] / "examples"
REPAIRED_LOSS = """
class MaskedLoss(nn.Module):
    def forward(self, scores, labels):
        labels.masked_fill_(labels == BACKGROUND, IGNORE)
        ordered = labels.flatten().sort().values
        classes = (ordered[1:] != ordered[:-1]).sum() + 1 - (labels == IGNORE).any().long()
        loss = nn.functional.cross_entropy(scores, labels, ignore_index=IGNORE)
        return torch.where(classes < MIN_CLASSES, 0.0 * scores.sum(), loss)


def parse_args"""


def sites(path: Path, *args: str) -> set[tuple[str, str, int]]:
    """Code, stripped text of the line, and waits a step, of each finding that waits."""
    script = torchtrim.Script(str(path), args=args, device="emulated", timeout=120)
    source = path.read_text().splitlines()
    return {
        (found.code, source[found.line - 1].strip(), found.count_per_step)
        for found in torchtrim.diagnose(script)
        if found.code in CODES
    }


UPLOADS = {
    ("TT103", "images = images.to(device, memory_format=torch.channels_last)", 1),
    ("TT103", "labels = labels.to(device)", 1),
}
IN_THE_LOSS = {
    ("TT102", "labels[(labels == BACKGROUND).nonzero(as_tuple=True)] = IGNORE", 1),
    ("TT103", "labels[(labels == BACKGROUND).nonzero(as_tuple=True)] = IGNORE", 1),
    ("TT102", "if (torch.unique(labels) != IGNORE).sum() < MIN_CLASSES:", 1),
    ("TT101", "if (torch.unique(labels) != IGNORE).sum() < MIN_CLASSES:", 1),
    (
        "TT102",
        "return nn.functional.cross_entropy(scores.permute(0, 2, 3, 1)[mask], labels[mask])",
        3,
    ),
}


def test_segmentation_waits_where_the_article_says() -> None:
    assert sites(EXAMPLES / "segmentation.py", "--batch-size", "2") == IN_THE_LOSS | UPLOADS


def test_a_repaired_loss_waits_no_more(tmp_path: Path) -> None:
    text = (EXAMPLES / "segmentation.py").read_text()
    before, _, rest = text.partition("\nclass MaskedLoss")
    (tmp_path / "repaired.py").write_text(
        f"{before}{REPAIRED_LOSS}{rest.partition('def parse_args')[2]}"
    )
    assert sites(tmp_path / "repaired.py", "--batch-size", "2") == UPLOADS


@pytest.mark.parametrize(
    ("name", "args", "waits"),
    [
        ("charlm", ("--batch-size", "2"), {("TT103", 4)}),
        pytest.param("resnet", ("--batch-size", "4"), {("TT103", 2)}, marks=pytest.mark.slow),
        pytest.param("gan", ("--batch-size", "4"), {("TT103", 1)}, marks=pytest.mark.slow),
        ("vit", ("--batch-size", "2"), {("TT103", 2)}),
    ],
)
def test_the_other_examples_only_upload(
    name: str, args: tuple[str, ...], waits: set[tuple[str, int]]
) -> None:
    found = sites(EXAMPLES / f"{name}.py", *args)
    assert {(code, count) for code, _, count in found} == waits
    assert all("device" in text for _, text, _ in found)
