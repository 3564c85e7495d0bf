"""`sizes[i].tolist()` and `mask.sum(1).tolist()` in a loop."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from fixes import proving
from torchtrim.fixes.loop_reads import INVARIANT_READ as FIX
from torchtrim.linter.text import fixed_text
from torchtrim.source.facts import Facts, Refused, Told
from torchtrim.source.source import Source

TYPES = (torch.float32, torch.bfloat16, torch.int64, torch.int32)
HEAD = """
def work(*found):
    [one.clear() for one in found if isinstance(one, list)]

def function(x, y, n):
"""


def make(rng: random.Random) -> Iterator[proving.Inputs]:
    dtype, rows, width = rng.choice(TYPES), rng.randint(1, 4), rng.randint(1, 3)
    for draw in range(proving.DRAWS):
        x = proving.integral(rng, (rows, width), torch.int64, 0, 9).to(dtype)
        y = proving.integral(rng, (rows,), torch.int64, 0, 9).to(dtype)
        yield {"x": x, "y": y, "n": rng.randint(0, rows) if draw else rows}


BODIES = {
    "rows": """
    out = []
    for i in range(n):
        first, *rest = x[i].tolist()
        # the size of each
        out.append((first, len(rest)))
    return out
""",
    "copies": """
    seen = []
    for i in range(n):
        for j in range(2):
            row = x[-1].tolist()
            row.append(i + j)
            seen.append(row)
    return seen
""",
    "elements": """
    out = []
    for i in range(n):
        if i % 2 == 0:
            out.append(int(y[i]) + i)
    return out
""",
    "two indices": """
    out = 0
    i = 0
    while i < n:
        out += x[i, 0].item()
        i += 1
    return out
""",
    "invariant": """
    lens = (x > 2).sum(1)
    out = []
    for i in range(n):
        given = lens.tolist()
        work(given, i)
        out.append(len(given))
    return out
""",
    "one number": """
    top = x.max() + 1
    out = []
    for i in range(n):
        work(i)
        out.append(top.item() * i)
    return out
""",
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_it_is_sound(body: str) -> None:
    proof = proving.prove(FIX, HEAD + body, make, structures=44)
    assert proof.reaches(176), proof


@pytest.mark.parametrize(
    "body",
    [
        "    for i in range(n):\n        work(x[i].tolist())\n        x[i] = 3\n",
        "    for i in range(n):\n        work(x, i)\n        n = y.sum().item()\n",
        "    for i in range(n):\n        y.add_(1)\n        work(y.sum().item())\n",
        "    z = y[0]\n    for i in range(n):\n        z += 1\n        work(y.sum().item())\n",
    ],
)
def test_what_may_be_written_to_is_not_safe(body: str) -> None:
    inputs = next(make(random.Random(1)))
    rewrite = proving.fixed(FIX, HEAD + body, inputs)
    assert "might write to" in rewrite.risk


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("    for i in range(n):\n        work(x.tolist())\n", "list of lists"),
        ("    for i in [slice(0, 2)]:\n        work(y[i].tolist())\n", "integer of Python's"),
        ("    while n and x.sum().item() < 0:\n        n -= 1\n", "decides whether and when"),
    ],
)
def test_it_is_refused(body: str, reason: str) -> None:
    with pytest.raises(Refused, match=reason):
        proving.fixed(FIX, HEAD + body, next(make(random.Random(1))))


def test_what_the_loop_binds_is_no_match() -> None:
    source = Source(
        "case.py",
        "def f(xs):\n    for x in xs:\n        y = x * 2\n        print(y.sum().item())\n",
    )
    assert not list(FIX.find(source))


def test_without_evidence_it_is_open() -> None:
    (match,) = FIX.find(Source("case.py", HEAD + BODIES["rows"]))
    assert not FIX.rewrite(match, Facts(told={"X": Told(kind="tensor")})).safe


def test_it_waits_once() -> None:
    inputs = {"x": torch.ones(4, 2), "y": torch.ones(4), "n": 4}
    assert proving.syncs_go(FIX, HEAD + BODIES["rows"], inputs) == (4, 1)


LOOP = (
    "import torch\ndef function(x: torch.Tensor, a, n: int):\n    y = []\n    for i in range(n):\n"
)


def unsafe(read: str) -> str:
    """The code of a loop with a read, as it is written without a run."""
    return fixed_text(
        "model.py", f"{LOOP}        y.insert(i, {read})\n    return y\n", unsafe=True
    )[0]


@pytest.mark.parametrize("shape", [(3,), (3, 1), (3, 1, 1)])
def test_without_a_run_rows_of_one_element_are_read_as_before(shape: tuple[int, ...]) -> None:
    before, after = f"{LOOP}        y.insert(i, x[i].item())\n    return y\n", unsafe("x[i].item()")
    assert "x_read[i]" in after
    x = torch.arange(3.0).reshape(shape)
    inputs = {"x": x, "a": None, "n": 3}
    assert proving.run(proving.compiled(before), inputs)[0] == [0.0, 1.0, 2.0]
    assert proving.run(proving.compiled(after), inputs)[0] == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("read", ["a[i].item()", "a.b[i].item()", "a[i].tolist()"])
def test_without_a_run_what_may_be_a_list_of_tensors_is_left(read: str) -> None:
    assert read in unsafe(read)
