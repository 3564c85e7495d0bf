"""Fixes of numbers that are read and written back into a tensor on the device."""

from __future__ import annotations

import pytest
import torch

from fixes import proving
from torchtrim.fixes.stored_read import FIX
from torchtrim.source.facts import FixRefused, StaticValue

HEAD = "import torch\ndef function(x, n):\n"


BODIES = {
    "loss": """
    losses = torch.zeros(len(x), device=x.device)
    for k, row in enumerate(x):
        losses[k] = row.square().mean().item()
    return losses.mean(), losses
""",
    "type and rows": """
    kept = torch.zeros(len(x), n, dtype=torch.float16, device=x.device)
    for k, row in enumerate(x):
        loss = row.sum(0, keepdim=True)
        kept[k, :2] = float(loss)
    return kept
""",
    "by a mask": """
    y = x * 2
    kept = torch.ones(y.shape, device=x.device)
    kept[y > 0] = y.sum().detach().cpu().item()
    return kept, y
""",
}


@pytest.mark.parametrize("name", BODIES)
def test_stored_read_is_sound(name: str) -> None:
    assert proving.prove(
        FIX, HEAD + BODIES[name], proving.rows_to_loop_over, structures=52
    ).reaches(150)


def test_stored_read_waits_no_more() -> None:
    inputs = {"x": torch.randn(5, 2), "n": 1}
    assert proving.syncs_go(FIX, HEAD + BODIES["loss"], inputs) == (10, 0)


@pytest.mark.parametrize(
    ("head", "text"),
    [
        ("@torch.no_grad()\ndef", "kept[0] = loss\n"),
        ("@torch.enable_grad()\ndef", "kept[0] = loss.detach()\n"),
        ("def", "kept[0] = loss.detach()\n"),
    ],
)
def test_a_stored_tensor_is_detached_where_autograd_may_record_it(head: str, text: str) -> None:
    body = "kept = torch.empty(3, device=d)\nkept[0] = loss.item()\nreturn kept\n"
    code = proving.code_of(f"import torch\n{head} function(loss, d):\n", body)
    assert text in proving.text_of(proving.unseen(FIX, code, X=StaticValue(kind="tensor")))


@pytest.mark.parametrize(
    "made",
    [
        "torch.zeros(3)",
        "torch.zeros(3, device='cpu')",
        "torch.zeros(3, dtype=torch.long, device=d)",
        "torch.full((3,), 0, device=d)",
        "loss.keep()",
        "torch.zeros(3, device=d) if d else loss.keep()",
    ],
)
def test_a_stored_read_needs_a_new_tensor_of_floats_on_a_device(made: str) -> None:
    body = f"kept = {made}\nkept[0] = loss.item()\nreturn kept\n"
    code = proving.code_of("import torch\ndef function(loss, d):\n", body)
    with pytest.raises(FixRefused, match="not created in this function"):
        proving.unseen(FIX, code, X=StaticValue(kind="tensor"))
