"""`x.to("cpu", non_blocking=True)`."""

from __future__ import annotations

import pytest

from torchtrim.fixes.refusals import UNSYNCHRONIZED_COPY as FIX
from torchtrim.source.facts import Facts, Refused
from torchtrim.source.source import Source


@pytest.mark.parametrize(
    "call",
    [
        'x.to("cpu", non_blocking=True)',
        'self.out[0].to(device="cpu", non_blocking=True)',
        'x.to(torch.device("cpu"), non_blocking=True).numpy()',
    ],
)
def test_it_is_refused(call: str) -> None:
    (match,) = FIX.find(Source("case.py", f"import torch\ndef f(self, x):\n    return {call}\n"))
    with pytest.raises(Refused, match="Record an event"):
        FIX.rewrite(match, Facts())


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
    assert not list(FIX.find(Source("case.py", f"def f(x, d):\n    return {call}\n")))
