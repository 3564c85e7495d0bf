"""What decides what the host does next."""

from __future__ import annotations

import pytest

from torchtrim.fixes.refusals import CONTROL_DEPENDENCE as FIX
from torchtrim.source.facts import Facts, Refused
from torchtrim.source.source import Source


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("    if torch.isnan(loss):\n        raise ValueError\n", "_assert_async"),
        (
            "    for x in loss:\n        if not torch.isfinite(x).all():\n            log()\n"
            "            continue\n",
            "Check every N steps",
        ),
        (
            "    while (active > 0).any():\n        active = step(active)\n",
            "how often the loop runs",
        ),
        (
            "    for i in range(0, n.item(), 64):\n        step(i)\n",
            "Count to one that the host knows",
        ),
        (
            "    if mask is None:\n        pass\n"
            "    elif (torch.diff(ids, dim=-1) >= 0).all():\n        return attend(ids)\n    step(mask)\n",
            "Ask first what the host knows",
        ),
        ("    if float(loss) == 0:\n        return\n", "the host must know"),
        ("    if grad.norm().isnan().item():\n        log(grad)\n", "read them once a step"),
        ("    return attend(x) if torch.all(mask == 1) else x\n", "Ask first"),
    ],
)
def test_it_is_refused_with_a_way_out(body: str, reason: str) -> None:
    source = Source("case.py", f"import torch\ndef f(loss, active, n, mask, ids, grad, x):\n{body}")
    reasons = []
    for match in FIX.find(source):
        with pytest.raises(Refused) as found:
            FIX.rewrite(match, Facts())
        reasons.append(str(found.value))
    assert any(reason in one for one in reasons), reasons


@pytest.mark.parametrize(
    "body",
    [
        "    if m.any():\n        x = x.masked_fill(m, 0)\n    return x\n",
        "    if x.sum() > 0:\n        return x * 2\n    return x * 3\n",
        "    for i in m:\n        print(i)\n",
    ],
)
def test_what_others_fix_is_no_match(body: str) -> None:
    assert not list(FIX.find(Source("case.py", f"def f(x, m):\n{body}")))
