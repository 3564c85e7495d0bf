"""Reads whose number could stay a tensor: a diff to copy."""

from __future__ import annotations

import pytest

from fixes import proving
from torchtrim.fixes.left_on_device import FIX
from torchtrim.linter.text import fixed_text, lint_text

HEAD = "import torch\ndef f(self, x: torch.Tensor, found: list, seen: dict):\n    t = x.sum()\n"


def shown(body: str) -> str:
    (match,) = proving.matches(FIX, proving.code_of(HEAD, body))
    rewrite = FIX.rewrite(match, proving.Facts())
    assert rewrite.advice
    assert not rewrite.safe
    return proving.text_of(rewrite).removeprefix(HEAD)


@pytest.mark.parametrize(
    ("body", "after"),
    [
        ("self.losses += t.mean().item()", "self.losses += t.mean().detach()"),
        ("n = t.item() ** 2\nself.total += n", "n = t.detach() ** 2\nself.total += n"),
        ("return x, {'n': (x > 0).sum().item()}", "return x, {'n': (x > 0).sum()}"),
        ("found.append(float(x.mean()))", "found.append(x.mean().detach())"),
        ("seen['a'] = x.detach().mean().cpu()", "seen['a'] = x.detach().mean()"),
        ("return -t.to('cpu')", "return -t"),
        ("y = x * 2\ny[0] = t.item()", "y = x * 2\ny[0] = t.detach()"),
        (
            "n = t.item() - 1\nx[x == n] = self.g(x, fill=n)\nx = x.new_full((2,), n)",
            "n = t.detach() - 1\nx[x == n] = self.g(x, fill=n)\nx = x.new_full((2,), n)",
        ),
    ],
)
def test_the_line_without_its_read_is_shown(body: str, after: str) -> None:
    assert shown(body) == proving.code_of("", after)


@pytest.mark.parametrize(
    "body",
    [
        "print(t.item())",
        "return f'{t.item()}'",
        "return range(t.item())",
        "n = t.item()\nprint(n)",
        "n = t.item()\nif x.shape[0] == n:\n    self.g(x, n)",
        "return x[t.item()]",
        "self.log(t.item())",
        "if t.item() > 0:\n    return x",
        "losses = torch.zeros(3)\nlosses[0] = t.item()",
    ],
)
def test_a_number_that_is_needed_is_no_match(body: str) -> None:
    assert not proving.matches(FIX, proving.code_of(HEAD, body))


def test_it_is_never_written() -> None:
    code = proving.code_of(HEAD, "self.losses += t.item()")
    (found,) = lint_text("case.py", code)
    assert found.fix is not None
    assert found.fix.kind == "advice"
    assert "+    self.losses += t.detach()" in (found.fix.diff or "")
    assert "`self.losses` can keep the tensor" in found.fix.reason
    assert fixed_text("case.py", code, unsafe=True) == (code, 0)
