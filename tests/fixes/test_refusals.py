"""Syncs that no form avoids: refused with the reason."""

from __future__ import annotations

import pytest
import torch

from fixes import proving
from torchtrim.fixes.refusals import (
    CONTROL_DEPENDENCE,
    DEVICE_BOUND,
    OPEN_SELECTION,
    OPEN_SHAPE,
    UNSYNCHRONIZED_COPY,
)
from torchtrim.source.facts import Facts, FixRefused
from torchtrim.source.source import SourceFile


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("if torch.isnan(loss):\n    raise ValueError", "_assert_async"),
        (
            "for x in loss:\n    if not torch.isfinite(x).all():\n        log()\n        continue",
            "Check every N steps",
        ),
        ("while (active > 0).any():\n    active = step(active)", "the number of iterations"),
        ("for i in range(0, n.item(), 64):\n    step(i)", "Count to one that the host knows"),
        (
            "if mask is None:\n    pass\nelif (torch.diff(ids, dim=-1) >= 0).all():\n"
            "    return attend(ids)\nstep(mask)",
            "Test first what the host knows",
        ),
        ("if float(loss) == 0:\n    return", "the host must know"),
        ("if grad.norm().isnan().item():\n    log(grad)", "read them once a step"),
        ("return attend(x) if torch.all(mask == 1) else x", "Test first"),
    ],
)
def test_control_dependence_is_refused_with_a_way_out(body: str, reason: str) -> None:
    source = SourceFile(
        "case.py",
        proving.code_of("import torch\ndef f(loss, active, n, mask, ids, grad, x):\n", body),
    )
    reasons = []
    for match in CONTROL_DEPENDENCE.find(source):
        with pytest.raises(FixRefused) as found:
            CONTROL_DEPENDENCE.rewrite(match, Facts())
        reasons.append(str(found.value))
    assert any(reason in one for one in reasons), reasons


@pytest.mark.parametrize(
    "body",
    [
        "if m.any():\n    x = x.masked_fill(m, 0)\nreturn x",
        "if x.sum() > 0:\n    return x * 2\nreturn x * 3",
        "for i in m:\n    print(i)",
    ],
)
def test_control_dependence_what_others_fix_is_no_match(body: str) -> None:
    assert not proving.matches(CONTROL_DEPENDENCE, proving.code_of("def f(x, m):\n", body))


BOUND_HEAD = "import torch\ndef function(x, n, mask):\n"
BOUND_INPUTS = {"x": torch.ones(3, 2), "n": torch.tensor(1), "mask": torch.ones(2, 2)}


@pytest.mark.parametrize(
    "line", ["return x[:n]", "return x[..., -n:]", "x[n : n + 1, :] = 0", "return x[::n]"]
)
def test_device_bound_gives_its_reason(line: str) -> None:
    code = f"{BOUND_HEAD}    {line}\n"
    proving.refuses(DEVICE_BOUND, code, BOUND_INPUTS, "decides the size of the slice")
    proving.refuses(DEVICE_BOUND, code, {**BOUND_INPUTS, "n": 1}, "another part of the line")
    with pytest.raises(FixRefused, match="the size of the slice"):
        proving.unseen(DEVICE_BOUND, code)


@pytest.mark.parametrize(
    "line",
    [
        "return x[:3], x[-1:], x[: len(mask)], x[: mask.shape[0] - 1], x[n]",
        "for i, end in enumerate(n):\n        mask[i, :end] = 1",
    ],
)
def test_device_bound_ignores_other_code(line: str) -> None:
    assert not proving.matches(DEVICE_BOUND, f"{BOUND_HEAD}    {line}\n")


SELECTION_HEAD = "import torch\ndef function(self, x, mask):\n"
MASK = torch.tensor([True, False, True])
SELECTION_INPUTS = {"self": {}, "x": torch.ones(3, 2), "mask": MASK}


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("return x[mask]", "as many rows as the mask has"),
        ("return x[mask].max()", "raises an error"),
        ("return torch.amin(x[mask])", "raises an error"),
        ("return x[mask].flatten().sort().values", "as many rows as the mask has"),
        ("return x[mask].topk(1)", "orders the selected elements"),
        ("return torch.median(x[mask])", "orders the selected elements"),
        ("return x[mask].std()", "the spread"),
        ("return x[mask.nonzero()]", "would wait as well"),
        ("return x[torch.nonzero(mask)]", "would wait as well"),
        ("return x[mask.nonzero().squeeze(1)]", "would wait as well"),
        ("return x[mask.bool(), 0]", "as many rows as the mask has"),
        ("return torch.masked_select(x, mask[:, None])", "as many rows as the mask has"),
        ("return x[torch.arange(3)]", "another part of the line"),
        ("return self.get('a', [x])[x.dim() - 2]", "another part of the line"),
    ],
)
def test_open_selection_gives_its_reason(line: str, why: str) -> None:
    proving.refuses(OPEN_SELECTION, f"{SELECTION_HEAD}    {line}\n", SELECTION_INPUTS, why)


@pytest.mark.parametrize(
    "line",
    [
        "return x[mask].mean()",
        "return torch.nn.functional.cross_entropy(x[mask], self.labels[mask])",
        "x[mask] = x[mask] * 2",
        "return torch.cat([x[mask], x[~mask]])",
        "return self.loss / x[mask].numel()",
        "return x[0], x[1:], x[..., None], x[0, :]",
    ],
)
def test_open_selection_leaves_code_of_other_fixes(line: str) -> None:
    assert not proving.matches(OPEN_SELECTION, f"{SELECTION_HEAD}    {line}\n")


def test_open_selection_is_refused_without_evidence_too() -> None:
    with pytest.raises(FixRefused, match="as many rows"):
        proving.unseen(OPEN_SELECTION, f"{SELECTION_HEAD}    return x[mask]\n")


def test_the_alternative_that_is_named_computes_the_same_spread() -> None:
    x, mask = torch.randn(50), torch.rand(50) < 0.5
    n = mask.sum()
    m = (x * mask).sum() / n
    assert torch.allclose((((x - m) ** 2) * mask).sum() / (n - 1), x[mask].var())


SHAPE_HEAD = "import torch\nimport torch.nn.functional as F\ndef function(x, mask, n):\n"

SAMPLING = """    positive = torch.nonzero((mask != -1) & (mask != n), as_tuple=True)[0]
    perm = torch.randperm(positive.numel(), device=positive.device)[:n]
    return positive[perm]
"""
LOOP = """    ids = x[:, 0].unique()  # the images
    for one in ids:
        n = n + (x[:, 0] == one).sum()
    return n
"""


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (SAMPLING, "random draws"),
        (LOOP, "once per distinct value"),
        ("    for one in x.unique():\n        print(one)\n", "once per distinct value"),
        ("    return torch.where(x > 0)\n", "nonzero_static"),
        ("    rows, columns = mask.nonzero(as_tuple=True)\n    return rows\n", "nonzero_static"),
        ("    return torch.argwhere(mask).flip(0)\n", "nonzero_static"),
        ("    return torch.unique(x, return_inverse=True, dim=0)\n", "distinct ones"),
        ("    return x.unique_consecutive(return_counts=True)\n", "distinct ones"),
        ("    return F.one_hot(x)\n", "num_classes=k"),
    ],
)
def test_open_shape_gives_its_reason(body: str, why: str) -> None:
    with pytest.raises(FixRefused, match=why):
        proving.unseen(OPEN_SHAPE, SHAPE_HEAD + body)


@pytest.mark.parametrize(
    "line",
    [
        "return (torch.unique(x) != 3).sum()",
        "return x.sum() / len(mask.nonzero())",
        "x[torch.where(mask)] = 0",
        "return x[mask.nonzero()]",
        "return torch.where(mask, x, 0), F.one_hot(x, 3), F.one_hot(x, num_classes=n)",
    ],
)
def test_open_shape_leaves_code_of_other_fixes(line: str) -> None:
    assert not proving.matches(OPEN_SHAPE, f"{SHAPE_HEAD}    {line}\n")


@pytest.mark.parametrize(
    "call",
    [
        'x.to("cpu", non_blocking=True)',
        'self.out[0].to(device="cpu", non_blocking=True)',
        'x.to(torch.device("cpu"), non_blocking=True).numpy()',
    ],
)
def test_unsynchronized_copy_is_refused(call: str) -> None:
    with pytest.raises(FixRefused, match="Record an event"):
        proving.unseen(UNSYNCHRONIZED_COPY, f"import torch\ndef f(self, x):\n    return {call}\n")


@pytest.mark.parametrize(
    "call",
    [
        'x.to("cpu")',
        'x.to("cuda", non_blocking=True)',
        'x.to("cpu", non_blocking=False)',
        "x.to(d, non_blocking=True)",
    ],
)
def test_what_waits_or_goes_elsewhere_is_no_match(call: str) -> None:
    assert not proving.matches(UNSYNCHRONIZED_COPY, f"def f(x, d):\n    return {call}\n")
