"""Fixes that read several scalars at once."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from fixes import proving
from torchtrim.fixes.coalesced_reads import COALESCED_READS, COLLECTED_READS
from torchtrim.linter.text import fixed_text
from torchtrim.source.facts import FixRefused

pytestmark = pytest.mark.filterwarnings("ignore:Converting a tensor")
TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def make_coalesced(rng: random.Random) -> Iterator[proving.Inputs]:
    size, dtype, graded = proving.shape(rng), rng.choice(TYPES), rng.random() < 0.5
    for _ in range(proving.DRAWS):
        x = proving.floating(rng, size, dtype, odd=rng.choice((0, 0.3))).requires_grad_(graded)
        yield {"x": x, "mask": proving.mask(rng, size)}


COALESCED_BODIES = {
    "accuracies": """
    wrong = (x > 0.0) != mask
    accuracy = 1 - (wrong.sum().item() / max(wrong.numel(), 1.0))
    num_positive = mask.sum().item()
    false_positive = (wrong & ~mask).sum().item() / max(
        mask.numel() - num_positive, 1.0
    )
    false_negative = (wrong & mask).sum().item() / max(num_positive, 1.0)
    return accuracy, num_positive, false_positive, false_negative
""",
    "dictionary": """
    logs, right = {}, (x > 0).sum()
    logs["loss"] = x.sum().item()
    logs["right"] = right.item()  # a count
    logs["again"] = float(x.sum())
    logs["bool"] = mask.any().item()
    return logs
""",
    "text": """
    loss, aux = x.sum(), x.abs().sum()
    return f"loss {loss.item():.4f} {aux.item()!r}", float(loss)
""",
    "returned": "    return x * 2, x.sum().item(), x.abs().sum().item()\n",
    "arguments": "    return dict(a=x.sum().item(), b=[int(mask.sum()), float(x.sum())])\n",
    "truths": """
    some, all_of_it = mask.any(), mask.all()
    first = bool(some)
    last = bool(all_of_it)
    return first, last
""",
    "condition": """
    low, high = x.detach().sum(), x.detach().abs().sum()
    if low.item() < high.item() - 1:
        return 1
    return 2
""",
}


@pytest.mark.parametrize("body", COALESCED_BODIES.values(), ids=COALESCED_BODIES)
def test_coalesced_reads_is_sound(body: str) -> None:
    code = f"import torch\ndef function(x, mask):\n{body}"
    assert proving.prove(COALESCED_READS, code, make_coalesced, structures=52).reaches(200)


@pytest.mark.parametrize(
    "body",
    [
        "a = x.sum().item()\nx.zero_()\nb = x.mean().item()\nreturn a, b",
        "a = x.sum().item()\nwork(x)\nb = x.mean().item()\nreturn a, b",
        "a = x.sum().item()\nx = x + a\nb = x.mean().item()\nreturn a, b",
        "return [v.item() for v in x]",
        "return x.sum().item() if x is not None else x.mean().item()",
        "return lambda: (x.sum().item(), x.mean().item())",
        "return work(x.sum().item(), work(x), x.mean().item())",
        "s = v = x\ns += x.sum().item()\nreturn v.mean().item()",
    ],
)
def test_what_is_not_the_same_moment_is_no_match(body: str) -> None:
    assert not proving.matches(COALESCED_READS, proving.code_of("def f(x, work):\n", body))


@pytest.mark.parametrize("inputs", [(torch.randn(()), torch.tensor(2**62 + 1)), (7, 3)])
def test_coalesced_reads_is_refused(inputs: tuple[object, object]) -> None:
    code = "def function(x, n):\n    return float(x), float(n)\n"
    if torch.is_tensor(inputs[0]):
        code = "def function(x, n):\n    return x.sum().item(), n.item()\n"
    with pytest.raises(FixRefused):
        proving.fixed(COALESCED_READS, code, dict(zip("xn", inputs, strict=True)))


def test_coalesced_reads_wait_once() -> None:
    code = f"import torch\ndef function(x, mask):\n{COALESCED_BODIES['accuracies']}"
    inputs = {"x": torch.randn(4, 5), "mask": torch.ones(4, 5, dtype=torch.bool)}
    assert proving.syncs_go(COALESCED_READS, code, inputs) == (4, 1)


@pytest.mark.parametrize(
    ("body", "stacked"),
    [
        ("n, s = (x > 0).sum().argmax().item(), x.sum().item()", False),
        ("n = x.argmax().item()\ns = x.max().item()", False),
        ("n = (x > 0).any().item()\ns = x.mean().item()", False),
        ("n = x.min().item()\ns = x.max().item()", True),
    ],
)
def test_without_a_run_only_reads_of_one_type_go_together(body: str, stacked: bool) -> None:
    code = proving.code_of("import torch\ndef f(x: torch.Tensor):\n", f"{body}\nreturn n, s")
    assert ("stack" in fixed_text("model.py", code, unsafe=True)[0]) == stacked


def make_collected(rng: random.Random) -> Iterator[proving.Inputs]:
    dtype, graded = rng.choice(TYPES), rng.random() < 0.5
    for draw in range(proving.DRAWS):
        rows = rng.choice((0, 1, 4)) if draw else rng.choice((1, 4))
        x = proving.floating(rng, (rows, 3), dtype, odd=rng.choice((0, 0.3)))
        yield {"x": x.requires_grad_(graded)}


COLLECTED_BODIES = {
    "dictionary": """
    losses = {f"loss_{i}": row.sum() for i, row in enumerate(x)}
    return {name: loss.item() for name, loss in losses.items()}
""",
    "detached": """
    class Owner: pass
    self = Owner()
    self.parts = {i: row.mean() for i, row in enumerate(x)}
    return dict(a={k: v.detach().cpu().item() for k, v in self.parts.items()})
""",
    "list": """
    losses = [row.sum() for row in x]
    return sum([float(v) for v in losses]), len(losses)
""",
    "tuple": "    return [v.item() for v in tuple(row.max() for row in x)]\n",
    "integers": """
    counts = [(row > 0).sum() for row in x]
    return [int(v) for v in counts] + [1]
""",
}


@pytest.mark.parametrize("body", COLLECTED_BODIES.values(), ids=COLLECTED_BODIES)
def test_collected_reads_is_sound(body: str) -> None:
    assert proving.prove(
        COLLECTED_READS, f"import torch\ndef function(x):\n{body}", make_collected, structures=52
    ).reaches(208)


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        ("[x.sum(), x.long().sum()]", "several types"),
        ("[x, x]", "zero dimensions"),
        ("x", "is a list"),
    ],
)
def test_collected_reads_is_refused(found: str, reason: str) -> None:
    code = f"def function(x):\n    found = {found}\n    return [v.item() for v in found]\n"
    proving.refuses(COLLECTED_READS, code, {"x": torch.ones(1)}, reason)


def test_collected_reads_waits_once() -> None:
    code = f"import torch\ndef function(x):\n{COLLECTED_BODIES['dictionary']}"
    assert proving.syncs_go(COLLECTED_READS, code, {"x": torch.ones(4, 3)}) == (4, 1)


@pytest.mark.parametrize(
    ("between", "at_once"),
    [("", True), ("    # why\n", False), ("    c = 1\n", False)],
)
def test_reads_that_are_only_assigned_are_assigned_at_once(between: str, at_once: bool) -> None:
    head = "import torch\ndef f(x, y):\n    a = x.max().item()\n"
    code = f"{head}{between}    b = y.max().item()\n    return a, b\n"
    after = fixed_text("m.py", code, unsafe=True)[0]
    assert ("    a, b = torch.stack((x.max(), y.max())).tolist()\n" in after) is at_once
    assert "reshape" not in after


def test_a_count_stays_an_integer_beside_a_sum_of_losses() -> None:
    code = """
import torch

def function(loader, net, criterion):
    loss_sum = 0
    correct = 0
    for x, y in loader:
        out = net(x)
        loss = criterion(out, y)
        loss_sum += loss.item()
        correct += out.argmax(1).eq(y).sum().item()
        print(f"loss {loss_sum} right {correct}")
"""
    text = fixed_text("train.py", code, unsafe=True)[0]
    assert 'print(f"loss {loss_sum.item()} right {correct.item()}")' in text


def test_items_are_assigned_at_once_unless_one_needs_another() -> None:
    head = "import torch\ndef f(a: torch.Tensor, b: torch.Tensor, seen: dict):\n"
    code = f'{head}    seen["a"] = a.sum().item()\n    seen["b"] = b.sum().item()\n'
    text = fixed_text("train.py", code, unsafe=True)[0]
    assert '    seen["a"], seen["b"] = torch.stack((a.sum(), b.sum())).tolist()\n' in text
    other = code.replace("b.sum()", '(b.sum() + seen["a"])')
    assert fixed_text("train.py", other, unsafe=True)[0] == other
