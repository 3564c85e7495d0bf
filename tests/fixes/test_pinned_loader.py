"""`batch.to(device)` of a loader's batch."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from fixes import proving
from torchtrim.fixes.pinned_loader import FIX
from torchtrim.rewriter.edits import compatible, patch
from torchtrim.source.facts import Facts
from torchtrim.source.source import SourceFile

HEAD = """
import torch
from torch.utils.data import DataLoader, TensorDataset

def function(rows, size, device):
    data = TensorDataset(torch.arange(rows).float().view(-1, 1) + torch.ones(3))
    loader = DataLoader(data, batch_size=size, shuffle=True)
    total, seen = torch.zeros(3, device=device), []
"""


def make(rng: random.Random) -> Iterator[proving.Inputs]:
    for _ in range(proving.DRAWS):
        yield {"rows": rng.randint(1, 4), "size": rng.randint(1, 3), "device": "cpu"}


BODIES = {
    "rebound": """
    for step, (x,) in enumerate(loader, start=1):
        x = x.to(device)
        total = total + x.sum(0) * step
    return total
""",
    "named": """
    for (x,) in loader:
        moved = x.to(device=device, dtype=torch.float64)
        seen.append((len(x), moved))
    return seen
""",
    "used at once": """
    for (x,) in loader:
        total += x.to(device).mean(0)
    return total
""",
}


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true:UserWarning")
@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_it_is_sound(body: str) -> None:
    assert proving.prove(FIX, HEAD + body, make, structures=84).reaches(336)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("for (x,) in loader:\n    y = x.to(device)\n    x.zero_()\nreturn y", "written to"),
        ("for (x,) in [(torch.ones(2),)]:\n    x = x.to(device)\nreturn x", "not a `DataLoader`"),
        (
            "other = loader\nDataLoader(data)\nfor (x,) in other:\n    x = x.to(device)",
            "several loaders",
        ),
    ],
)
def test_it_is_refused(body: str, reason: str) -> None:
    proving.refuses(
        FIX, proving.code_of(HEAD, body), {"rows": 3, "size": 2, "device": "cpu"}, reason
    )


def test_arguments_that_are_not_seen_are_refused() -> None:
    code = (HEAD + BODIES["rebound"]).replace("shuffle=True", "**{}")
    proving.refuses(FIX, code, {"rows": 3, "size": 2, "device": "cpu"}, "are not visible here")


def test_a_batch_whose_other_part_is_not_seen_is_not_safe() -> None:
    code = (HEAD + "    for x, y in loader:\n        x = x.to(device)\n    return x\n").replace(
        "torch.ones(3))", "torch.ones(3), torch.ones(rows))"
    )
    assert not proving.fixed(FIX, code, {"rows": 3, "size": 2, "device": "cpu"}).safe


def test_two_moves_give_the_loader_one_keyword() -> None:
    code = (
        "from torch.utils.data import DataLoader\ndef f(d, m):\n    loader = DataLoader(d)\n"
        "    for x, y in loader:\n        m(x.to('cuda'), y.cuda())\n"
    )
    source = SourceFile("case.py", code)
    rewrites = [FIX.rewrite(match, Facts()) for match in FIX.find(source)]
    assert compatible(rewrites) == rewrites
    text = patch(source, rewrites).text
    assert (text.count("pin_memory="), text.count("non_blocking=True")) == (1, 2)


def test_it_waits_no_more() -> None:
    code = HEAD + BODIES["rebound"]
    inputs = {"rows": 4, "size": 2, "device": "cpu"}
    rewrite = proving.fixed(FIX, code, inputs)
    after = proving.text_of(rewrite)
    inputs["device"] = "cuda"
    assert (proving.waits(code, inputs), proving.waits(after, inputs)) == (2, 0)
