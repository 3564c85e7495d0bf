from __future__ import annotations

import msgspec
import pytest
import torch

from torchtrim.observe.modules import Modules
from torchtrim.records.trial import Step
from torchtrim.run.evidence import Evidence


@pytest.mark.parametrize(
    ("loss", "told"), [(0.5, 0.5), ("nan", None), ("inf", None), ("1+2j", None)]
)
def test_a_loss_of_any_value_travels(loss: float | str, told: float | None) -> None:
    evidence = Evidence(Modules())
    evidence.backward_starts((torch.tensor(complex(loss) if loss == "1+2j" else float(loss)),))
    step = msgspec.json.decode(msgspec.json.encode(evidence.step), type=Step)
    assert step.losses == [told]
    assert list(step.digests) == ["loss:loss"]
