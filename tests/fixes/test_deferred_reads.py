"""Fixes of reads in a loop that can wait until after it."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from fixes import proving
from torchtrim.fixes.deferred_reads import ACCUMULATED_READ, APPENDED_READ
from torchtrim.source.facts import FixRefused, StaticValue

pytestmark = pytest.mark.filterwarnings("ignore:Converting a tensor")


ACCUMULATED_BODIES = {
    "mean": """
    total = 0.0
    for row in x:
        loss = row.square().mean()
        total += loss.item()
        loss.data.zero_()  # changed afterwards
    return total
""",
    "products": """
    running_loss, seen = 0.0, 0
    for row in x:
        running_loss += float(row.sum()) * len(row) * 2
        seen += 1
    return running_loss / max(seen, 1)
""",
    "quotient": """
    total = 0.0
    for row in x:
        total += row.mean().item() / n
    return total
""",
    "quotient of tensors": """
    total = 0.0
    for row in x:
        total += (row.sum() / row.abs().sum()).item() * n
    return total
""",
    "quotient by a quotient": """
    total = 0.0
    for row in x:
        total += row.mean().item() / (n / 3)
    return total
""",
    "starts as an integer": """
    total = 0
    for epoch in range(2):
        for row in x:
            total -= row.max().detach().cpu().item()
    return [total]
""",
    "looked at within": """
    total, seen = 0.0, []
    for i, row in enumerate(x):
        total += row.mean().item()
        if i % 2 == 1:
            seen.append(f"{total / 2:.3f} {total}")
            total = 0.0
    else:
        seen.append(total)
    return seen, total
""",
    "count": """
    correct = 0
    for row in x:
        correct += (row > 0).sum().item()
    return correct, n
""",
    "powers in branches": """
    total = 0
    for i, row in enumerate(x):
        if i % 2:
            norm = row.norm()
            total += norm.item()**2
        else:
            total += row.abs().sum().item() * n
    total = float(total) + 1
    return total
""",
    "several epochs": """
    out = []
    for epoch in range(n):
        total = 0.0
        for row in x:
            total += row.sum().item()
        out.append(total)
    return out
""",
}


@pytest.mark.parametrize("name", ACCUMULATED_BODIES)
def test_accumulated_read_is_sound(name: str) -> None:
    code = f"import torch\ndef function(x, n):\n{ACCUMULATED_BODIES[name]}"
    half_seen = name == "powers in branches"  # with one row, and then the fix is not safe
    proof = proving.prove(
        ACCUMULATED_READ, code, proving.rows_to_loop_over, structures=40, suggested=half_seen
    )
    assert proof.reaches(155)


def test_integers_of_many_types_are_sound() -> None:
    def of_integers(rng: random.Random) -> Iterator[proving.Inputs]:
        dtype = rng.choice((torch.int8, torch.uint8, torch.int16, torch.int32, torch.bool))
        for draw in range(proving.DRAWS):
            x = proving.integral(rng, (rng.choice((0, 2, 5)) if draw else 3,), dtype, 0, 2)
            yield {"x": x}

    code = "def function(x):\n    n = 0\n    for v in x:\n        n += v.item()\n    return n\n"
    assert proving.prove(ACCUMULATED_READ, code, of_integers, structures=40).reaches(160)


def test_large_integers_are_not_sure_to_fit() -> None:
    code = "def function(x):\n    n = 0\n    for v in x:\n        n += v.item()\n    return n\n"
    rewrite = proving.fixed(ACCUMULATED_READ, code, {"x": torch.tensor([2**62, 2**62])})
    assert not rewrite.safe


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("for v in x:\n    self.total += v.item()", "read by other code"),
        ("for v in x:\n    n += v.item()\nreturn n", "is an argument"),
        ("t = n\nfor v in x:\n    t += v.item()\nreturn t", "does not start as a literal number"),
        ("t = 0.0\nf = lambda: t\nfor v in x:\n    t += v.item()\nreturn t", "an inner function"),
        (
            "t = 0.0\ntry:\n    for v in x:\n        t += v.item()\nfinally:\n    n = t\nreturn t",
            "a `try` around",
        ),
        (
            "t = 0.0\nfor v in x:\n    t += v.item()\n    t *= 2\nreturn t",
            "changes `t` in the same loop",
        ),
        ("t = 0.0\nfor v in x:\n    t += v.item()\nlocals()\nreturn t", "in the meantime"),
    ],
)
def test_accumulated_read_is_refused(body: str, reason: str) -> None:
    class Owner:
        total = 0.0

    inputs = {"self": Owner(), "x": torch.randn(3), "n": 0.0}
    proving.refuses(
        ACCUMULATED_READ,
        proving.code_of("E = Exception\ndef function(self, x, n):\n", body),
        inputs,
        reason,
    )


def test_a_power_of_unknown_exponent_is_not_sure_to_be_real() -> None:
    code = "def function(x, n):\n    t = 0.0\n    for v in x:\n        t += v.item() ** n\n    return t\n"
    rewrite = proving.fixed(ACCUMULATED_READ, code, {"x": torch.rand(3), "n": 2.0})
    assert "complex" in rewrite.risk


def test_a_name_with_another_value_later_has_its_own_sum() -> None:
    code = proving.code_of(
        "def function(x, n):\n",
        "t = 0\nfor v in x:\n    t += v.item()**2\nt = [float(t)]\nt = t[0] ** 0.5\nreturn t",
    )
    rewrite = proving.fixed(ACCUMULATED_READ, code, {"x": torch.rand(3), "n": 1})
    assert [edit.text for edit in rewrite.edits] == ["t += v.detach().double()**2"]


def test_accumulated_read_waits_once() -> None:
    code = f"def function(x, n):\n{ACCUMULATED_BODIES['mean']}"
    assert proving.syncs_go(ACCUMULATED_READ, code, {"x": torch.randn(5, 2), "n": 1}) == (5, 1)


HEAD = "import torch\nimport numpy as np\ndef function(x, n):\n"

APPENDED_BODIES = {
    "losses": """
    losses = []
    for row in x:
        loss = row.square().mean()
        losses.append(loss.item())
        loss.data.zero_()  # changed afterwards
    return losses
""",
    "epochs": """
    losses = [0.5]
    same = losses[0]
    for epoch in range(n):
        for row in x:
            losses.append(float(row.sum()))
    return losses, sum(losses), same
""",
    "read between": """
    history, means = list(), []
    for epoch in range(n):
        for row in x:
            history.append(100.0 * row.mean().item() / 7)
        means.append(np.mean(history) if len(history) else 0.0)
    return history
""",
    "counts": """
    counts = []
    for row in x:
        counts.append((row > 0).sum().item())
        if len(row) > 3:
            continue
    return counts
""",
    "reported": """
    losses, seen = [], []
    for step, row in enumerate(x):
        loss = row.square().mean()
        value = loss.item()
        losses.append(value)
        if step % 2 == 1:
            average, largest = np.mean(losses), max(losses)
            seen.append((average, largest, len(losses)))
            losses.clear()
    return seen
""",
    "reported, and changed": """
    losses, seen = [], []
    for step, row in enumerate(x):
        loss = row.sum(0, keepdim=True)
        losses.append(float(loss))
        loss.data.zero_()
        if step % n == 0:
            seen.append(sum(losses))
    return seen
""",
    "reset": """
    losses, seen = [], []
    for step, row in enumerate(x):
        loss = row.sum() * 2
        losses.append(loss.item())
        if step % n == 0:
            seen.append(sum(losses) / len(losses))
            losses = []
    return seen
""",
    "averaged by its own name": """
    out = []
    for epoch in range(n):
        losses = []
        for row in x:
            loss = row.square().sum()
            losses.append(loss.item())
            loss = loss * 2
        losses = np.average(losses) if losses else 0.0
        out.append(losses)
    return out
""",
    "written to": """
    losses, total = [], x.sum()
    for row in x:
        total += row.mean()
        losses.append(total.item())
    return losses
""",
    "not new": """
    losses, total = [], x.detach().mean()
    for row in x:
        losses.append(total.item())
        row = total
        row += 1
    return losses
""",
    "one element": """
    losses = []
    for row in x:
        losses.append(row.sum(0, keepdim=True).item())
    return losses
""",
}


@pytest.mark.parametrize("body", APPENDED_BODIES.values(), ids=APPENDED_BODIES)
def test_appended_read_is_sound(body: str) -> None:
    assert proving.prove(
        APPENDED_READ, HEAD + body, proving.rows_to_loop_over, structures=52
    ).reaches(200)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("for v in x:\n    n.losses.append(v.item())", "read by other code"),
        ("for v in x:\n    n.append(v.item())\nreturn n", "is an argument"),
        ("t = n.get()\nfor v in x:\n    t.append(v.item())\nreturn t", "not created"),
        ("t = []\nn.all = t\nfor v in x:\n    t.append(v.item())", "may keep `t`"),
        (
            "t = []\nfor v in x:\n    t.append(v.item())\n    n.log(t)\nreturn t",
            "before the loop ends",
        ),
        ("for v in x:\n    t = []\n    t.append(v.item())", "is reset"),
        (
            "t = []\nfor v in x:\n    try:\n        t.append(v.item())\n        if n:\n"
            "            n.log(sum(t))\n            t.clear()\n    except E:\n        pass",
            "before the loop ends",
        ),
        (
            "t = []\nfor _ in x:\n    for v in x:\n        t.append(v.item())\n    n.all = t",
            "may keep `t`",
        ),
    ],
)
def test_appended_read_is_refused(body: str, reason: str) -> None:
    proving.refuses(
        APPENDED_READ,
        proving.code_of("def function(x, n):\n", body),
        {"x": torch.randn(3), "n": None},
        reason,
    )


def test_a_list_that_is_reported_keeps_tensors() -> None:
    text = proving.text_of(
        proving.unseen(
            APPENDED_READ, HEAD + APPENDED_BODIES["reported"], L0=StaticValue(kind="tensor")
        )
    )
    assert "        losses.append(loss.detach())\n" in text
    assert "            losses = torch.stack(losses).flatten().tolist()\n" in text
    assert "np.mean(losses), max(losses)" in text
    assert "value" not in text


def test_a_list_that_is_used_after_the_loop_keeps_tensors() -> None:
    text = proving.text_of(
        proving.unseen(
            APPENDED_READ,
            HEAD + APPENDED_BODIES["averaged by its own name"],
            L0=StaticValue(kind="tensor"),
        )
    )
    assert "            losses.append(loss.detach())\n" in text
    after = "        if losses:\n            losses = torch.stack(losses).flatten().tolist()\n"
    assert f"{after}        losses = np.average(losses)" in text


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("return seen", "return seen, losses"),
        ("losses, seen = [], []", "losses, seen = [0.5], []"),
        ("max(losses)", "n(losses)"),
        ("np.mean(losses), max(losses)", "np.mean(losses), losses"),
        ("losses.clear()", "losses.clear()\n            n(len(losses))"),
        ("if step % 2 == 1:", "if len(losses):"),
    ],
)
def test_a_list_that_is_used_otherwise_is_refused(old: str, new: str) -> None:
    code = HEAD + APPENDED_BODIES["reported"].replace(old, new)
    with pytest.raises(FixRefused, match="before the loop ends"):
        proving.unseen(APPENDED_READ, code, L0=StaticValue(kind="tensor"))


def test_appended_read_waits_once() -> None:
    inputs = {"x": torch.randn(5, 2), "n": 1}
    assert proving.syncs_go(APPENDED_READ, HEAD + APPENDED_BODIES["losses"], inputs) == (5, 1)


UNSEEN = """
import torch

def function(batches, labels):
    correct = seen = 0
    loss = 0.0
    for x, y in zip(batches, labels):
        correct += int((x == y).sum())
        seen += len(y)
    return correct / seen
"""


def test_without_a_run_a_count_is_written_the_same() -> None:
    text = proving.text_of(proving.unseen(ACCUMULATED_READ, UNSEEN, L0=StaticValue(kind="tensor")))
    assert "        correct += (x == y).sum()\n" in text
    assert "    return int(correct) / seen\n" in text


@pytest.mark.parametrize("root", ["total ** 0.5", "math.sqrt(total)", "total / 2"])
def test_a_sum_whose_root_is_taken_is_read_there(root: str) -> None:
    body = f"total = 0\nfor v in x:\n    total += v.data.norm().item() ** 2\ntotal = {root}\nreturn total"
    code = proving.code_of("import math\nimport torch\ndef function(x):\n", body)
    text = proving.text_of(proving.unseen(ACCUMULATED_READ, code, L0=StaticValue(kind="tensor")))
    assert "    total += v.data.norm().double() ** 2\n" in text
    assert f"total = {root.replace('total', 'float(total)')}\n" in text
    for x in ([], [torch.randn(3), torch.randn(3)]):
        results = [proving.run(proving.compiled(one), {"x": x})[0] for one in (code, text)]
        assert type(results[0]) is type(results[1])
        assert results[0] == pytest.approx(results[1])


LOOP = """
def function(batches, every):
    total = 0.0
    correct = 0
    seen = []
    for it, x in enumerate(batches):
        loss = x.square().mean()
        total += loss.item()
        correct += (x > 0).sum().item()
        if it % every == every - 1:
            seen.append((it, total / (it + 1), f"{total:.4f}", correct))
    return seen, total / len(batches)
"""
AS_WRITTEN = """
def function(batches, every):
    total = 0.0
    correct = 0
    seen = []
    for it, x in enumerate(batches):
        loss = x.square().mean()
        total += loss.detach().double()
        correct += (x > 0).sum()
        if it % every == every - 1:
            seen.append((it, total.item() / (it + 1), f"{total.item():.4f}", correct.item()))
    return seen, float(total) / len(batches)
"""


def test_a_counter_of_a_training_loop_is_written_as_by_hand() -> None:
    batches = [torch.randn(3, 4, requires_grad=True) for _ in range(7)]
    inputs = {"batches": batches, "every": 3}
    assert proving.as_written(ACCUMULATED_READ, LOOP, inputs) == AS_WRITTEN
    runs = [proving.run(proving.compiled(text), inputs)[0] for text in (LOOP, AS_WRITTEN)]
    assert runs[0] == runs[1]


def test_an_empty_loop_still_gives_a_number() -> None:
    text = AS_WRITTEN.replace("len(batches)", "1")
    assert proving.run(proving.compiled(text), {"batches": [], "every": 3})[0] == ([], 0.0)
