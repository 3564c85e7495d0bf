"""Fixes of reads in a loop that one read before it can replace."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from fixes import proving
from torchtrim.fixes.loop_reads import INVARIANT_READ, ITERATED_READ
from torchtrim.linter.text import fixed_text
from torchtrim.source.facts import Facts, StaticValue
from torchtrim.source.source import SourceFile

INVARIANT_TYPES = (torch.float32, torch.bfloat16, torch.int64, torch.int32)
HEAD = """
def work(*found):
    [one.clear() for one in found if isinstance(one, list)]

def function(x, y, n):
"""


def make_invariant(rng: random.Random) -> Iterator[proving.Inputs]:
    dtype, rows, width = rng.choice(INVARIANT_TYPES), rng.randint(1, 4), rng.randint(1, 3)
    for draw in range(proving.DRAWS):
        x = proving.integral(rng, (rows, width), torch.int64, 0, 9).to(dtype)
        y = proving.integral(rng, (rows,), torch.int64, 0, 9).to(dtype)
        yield {"x": x, "y": y, "n": rng.randint(0, rows) if draw else rows}


INVARIANT_BODIES = {
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


@pytest.mark.parametrize("body", INVARIANT_BODIES.values(), ids=INVARIANT_BODIES)
def test_invariant_read_is_sound(body: str) -> None:
    assert proving.prove(INVARIANT_READ, HEAD + body, make_invariant, structures=44).reaches(176)


@pytest.mark.parametrize(
    "body",
    [
        "for i in range(n):\n    work(x[i].tolist())\n    x[i] = 3",
        "for i in range(n):\n    work(x, i)\n    n = y.sum().item()",
        "for i in range(n):\n    y.add_(1)\n    work(y.sum().item())",
        "z = y[0]\nfor i in range(n):\n    z += 1\n    work(y.sum().item())",
    ],
)
def test_what_may_be_written_to_is_not_safe(body: str) -> None:
    inputs = next(make_invariant(random.Random(1)))
    rewrite = proving.fixed(INVARIANT_READ, proving.code_of(HEAD, body), inputs)
    assert "might write to" in rewrite.risk


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("for i in range(n):\n    work(x.tolist())", "list of lists"),
        ("for i in [slice(0, 2)]:\n    work(y[i].tolist())", "Python integer"),
        ("while n and x.sum().item() < 0:\n    n -= 1", "too often or too early"),
    ],
)
def test_invariant_read_is_refused(body: str, reason: str) -> None:
    proving.refuses(
        INVARIANT_READ, proving.code_of(HEAD, body), next(make_invariant(random.Random(1))), reason
    )


def test_what_the_loop_binds_is_no_match() -> None:
    source = SourceFile(
        "case.py",
        "def f(xs):\n    for x in xs:\n        y = x * 2\n        print(y.sum().item())\n",
    )
    assert not list(INVARIANT_READ.find(source))


def test_invariant_read_without_evidence_it_is_open() -> None:
    (match,) = proving.matches(INVARIANT_READ, HEAD + INVARIANT_BODIES["rows"])
    assert not INVARIANT_READ.rewrite(match, Facts(static={"X": StaticValue(kind="tensor")})).safe


def test_invariant_read_waits_once() -> None:
    inputs = {"x": torch.ones(4, 2), "y": torch.ones(4), "n": 4}
    assert proving.syncs_go(INVARIANT_READ, HEAD + INVARIANT_BODIES["rows"], inputs) == (4, 1)


LOOP = (
    "import torch\ndef function(x: torch.Tensor, a, n: int):\n    y = []\n    for i in range(n):\n"
)


def unsafe(read: str) -> str:
    """Return the code of a loop with a read, as the fix writes it without a run."""
    return fixed_text(
        "model.py", f"{LOOP}        y.insert(i, {read})\n    return y\n", unsafe=True
    )[0]


@pytest.mark.parametrize("shape", [(3,), (3, 1), (3, 1, 1)])
def test_without_a_run_rows_of_one_element_are_read_as_before(shape: tuple[int, ...]) -> None:
    before, after = f"{LOOP}        y.insert(i, x[i].item())\n    return y\n", unsafe("x[i].item()")
    assert "x_list[i]" in after
    x = torch.arange(3.0).reshape(shape)
    inputs = {"x": x, "a": None, "n": 3}
    assert proving.run(proving.compiled(before), inputs)[0] == [0.0, 1.0, 2.0]
    assert proving.run(proving.compiled(after), inputs)[0] == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("read", ["a[i].item()", "a.b[i].item()", "a[i].tolist()"])
def test_without_a_run_what_may_be_a_list_of_tensors_is_left(read: str) -> None:
    assert read in unsafe(read)


ITERATED_TYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.int64,
    torch.uint8,
    torch.bool,
)


def make_iterated(rng: random.Random) -> Iterator[proving.Inputs]:
    dtype = rng.choice(ITERATED_TYPES)
    for _ in range(proving.DRAWS):
        size = (rng.choice((0, 1, 5)),)
        x = proving.floating(rng, size, dtype) if dtype.is_floating_point else None
        yield {"x": proving.integral(rng, size, dtype, 0, 3) if x is None else x}


ITERATED_BODIES = {
    "int": "    return [int(v) for v in x]\n",
    "item": "    return {v.item() for v in x.flatten() if v.item() > 0}\n",
    "sum": "    return sum(float(v) for v in x), max((v for v in [1, 2]))\n",
    "loop": """
    out, n = [], 0
    for v in x:
        # each of them
        n += 1
        out.append(v.item() * n)
    return out
""",
    "counted": """
    total = 0
    for i, v in enumerate(x):
        total += float(v) * i
    return total
""",
    "text": '    return [f"{v.item()!r:>8}" for v in x]\n',
}


@pytest.mark.parametrize("body", ITERATED_BODIES.values(), ids=ITERATED_BODIES)
def test_iterated_read_is_sound(body: str) -> None:
    assert proving.prove(
        ITERATED_READ, f"def function(x):\n{body}", make_iterated, structures=44
    ).reaches(176)


@pytest.mark.parametrize(
    "body",
    [
        "return [v for v in x]",
        "return [v * 2 for v in x]",
        "return [(v.item(), v.grad_fn) for v in x]",
        "return [v.item() for v in zip(x, x)]",
    ],
)
def test_what_uses_the_tensors_is_no_match(body: str) -> None:
    assert not proving.matches(ITERATED_READ, proving.code_of("def f(x):\n", body))


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("return [int(v) for v in x]", "tensor of one dimension"),
        ("for v in x:\n    print(v.item(), end='')\nreturn v", "used as a tensor after the loop"),
        ("return list(w for w in (v.item() for v in x.flatten()))", "maybe later"),
    ],
)
def test_iterated_read_is_refused(body: str, reason: str) -> None:
    inputs = {"x": torch.ones(1, 1) if "int(v)" in body else torch.ones(2)}
    proving.refuses(ITERATED_READ, proving.code_of("def function(x):\n", body), inputs, reason)


def test_a_function_that_might_write_makes_it_unsafe() -> None:
    code = (
        "def work(v):\n    return v\n\ndef function(x):\n    return [work(v.item()) for v in x]\n"
    )
    assert "might write" in proving.fixed(ITERATED_READ, code, {"x": torch.ones(2)}).risk


def test_iterated_read_waits_once() -> None:
    code = f"def function(x):\n{ITERATED_BODIES['loop']}"
    assert proving.syncs_go(ITERATED_READ, code, {"x": torch.ones(4)}) == (4, 1)


def test_a_shared_line_of_imports_refuses_only_a_fix_that_adds_an_import() -> None:
    code = (
        "from torch.nn.functional import relu\nimport os; n = 1\n\ndef function(x, out):\n"
        "    x = relu(x).cuda()\n    for i in range(n):\n        out.append(sum(x.tolist()))\n"
    )
    assert "if x_list is None" in fixed_text("model.py", code, unsafe=True)[0]


def test_what_is_a_tensor_before_the_loop_is_read_there() -> None:
    head = "import torch\ndef function(x: torch.Tensor, z: torch.Tensor):\n    y = x + 1\n"
    loop = "    for i in range(3):\n        print(x[i].item())\n"
    after = fixed_text("m.py", head + loop, unsafe=True)[0]
    assert "x_list = x.flatten().tolist()\n    for" in after
    rebound = f"{head}    if y is None:\n        x = z\n{loop}"
    assert "x_list is None" in fixed_text("m.py", rebound, unsafe=True)[0]
