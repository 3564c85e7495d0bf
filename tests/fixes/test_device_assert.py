"""`assert (a >= b).all()`."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from fixes import proving
from torchtrim.fixes.device_assert import FIX
from torchtrim.source.facts import Refused
from torchtrim.source.source import Source


def make(rng: random.Random) -> Iterator[proving.Inputs]:
    size, dtype = proving.shape(rng), rng.choice((torch.float32, torch.bfloat16, torch.float64))
    for _ in range(proving.DRAWS):
        yield {"x": proving.floating(rng, size, dtype).abs()}


TESTS = (
    'assert (x >= 0).all(), "no negative ones"',
    "assert not torch.isnan(x).any()",
    "assert not (x < 0).any(), (\n        'negative'\n    )",
    "assert torch.isfinite(x).all()",
)


@pytest.mark.parametrize("line", TESTS)
def test_what_holds_is_the_same_and_never_safe(line: str) -> None:
    code = f"import torch\ndef function(x):\n    {line}\n    return x * 2\n"
    proof = proving.prove(FIX, code, make, structures=65, suggested=True)
    assert proof.reaches(260)
    assert not proving.prove(FIX, code, make, structures=2).agreed


def test_what_does_not_hold_raises_still() -> None:
    code = f"import torch\ndef function(x):\n    {TESTS[0]}\n    return x\n"
    rewrite = proving.fixed(FIX, code, {"x": torch.ones(3)})
    assert "can use the device no more" in rewrite.risk
    (edit,) = rewrite.edits
    assert edit.text == 'torch._assert_async((x >= 0).all(), "no negative ones")'
    with pytest.raises(RuntimeError, match="no negative ones"):
        torch._assert_async((torch.tensor([-1.0]) >= 0).all(), "no negative ones")


def test_a_message_that_is_computed_is_refused() -> None:
    code = 'def function(x):\n    assert (x > 0).all(), f"found {x}"\n'
    with pytest.raises(Refused, match="computed where it fails"):
        proving.fixed(FIX, code, {"x": torch.ones(3)})


def test_what_the_host_knows_is_no_match() -> None:
    assert not list(FIX.find(Source("case.py", "def f(x, n):\n    assert x.ndim == 2 and n > 3\n")))


def test_it_waits_no_more() -> None:
    code = f"import torch\ndef function(x):\n    {TESTS[0]}\n    return x\n"
    assert proving.syncs_go(FIX, code, {"x": torch.ones(3)}) == (1, 0)
