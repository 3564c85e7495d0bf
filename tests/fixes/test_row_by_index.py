"""`table[t.item()]`."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from fixes import proving
from torchtrim.fixes.row_by_index import FIX
from torchtrim.source.facts import Refused

BODIES = (
    "return table[t.item()] * 2",
    "return table[int(t)].sum()",
    "return 1 - (table + 1)[t]",
    "return x * table[t[None][0]]",
)


def make(rng: random.Random) -> Iterator[proving.Inputs]:
    size = (rng.choice((1, 3, 5)), *proving.shape(rng, most=2, least=0))
    dtype, graded = rng.choice((torch.float32, torch.bfloat16, torch.float64)), rng.random() < 0.5
    for _ in range(proving.DRAWS):
        table = proving.floating(rng, size, dtype).requires_grad_(graded)
        t = torch.tensor(rng.randrange(-size[0], size[0]))
        yield {"table": table, "t": t, "x": proving.floating(rng, (), dtype)}


@pytest.mark.parametrize("body", BODIES)
def test_it_is_the_same_and_never_safe(body: str) -> None:
    code = f"def function(table, t, x):\n    {body}\n"
    if body.endswith("[0]]"):
        code = f"def function(table, t, x):\n    t = t + 0\n    {body.replace('t[None][0]', 't')}\n"
    proof = proving.prove(FIX, code, make, structures=65, suggested=True)
    assert proof.reaches(260), proof
    assert not proving.prove(FIX, code, make, structures=2).agreed


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("return table[n] + 1", "64-bit integer"),
        ("return table[t.int()] + 1", "64-bit integer"),
        ("row = table[t]\n    row.add_(1)\n    return row", "may be written to"),
    ],
)
def test_it_is_refused(body: str, reason: str) -> None:
    inputs = {"table": torch.ones(3), "t": torch.tensor(1), "n": 2}
    with pytest.raises(Refused, match=reason):
        proving.fixed(FIX, f"def function(table, t, n):\n    {body}\n", inputs)


@pytest.mark.parametrize("read", ["t.item()", "t"])
def test_it_waits_no_more(read: str) -> None:
    code = f"def function(table, t):\n    return table[{read}] + 1\n"
    assert proving.syncs_go(FIX, code, {"table": torch.ones(3), "t": torch.tensor(1)}) == (1, 0)
