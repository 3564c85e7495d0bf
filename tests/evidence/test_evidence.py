from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

from torchtrim.capture.build import Setting
from torchtrim.capture.modules import Modules
from torchtrim.emulator import emulate
from torchtrim.evidence.evidence import Evidence
from torchtrim.records.trial import Request, TrialStep
from torchtrim.runner.session import Session


@pytest.mark.parametrize(
    ("loss", "told"), [(0.5, 0.5), ("nan", None), ("inf", None), ("1+2j", None)]
)
def test_a_loss_of_any_value_travels(loss: float | str, told: float | None) -> None:
    evidence = Evidence(Modules())
    evidence.backward_starts((torch.tensor(complex(loss) if loss == "1+2j" else float(loss)),))
    step = msgspec.json.decode(msgspec.json.encode(evidence.step), type=TrialStep)
    assert step.losses == [told]
    assert list(step.digests) == ["loss:loss"]


def test_gradients_of_a_second_model_have_its_names_in_updates() -> None:
    modules = Modules()
    evidence = Evidence(modules)
    for _ in range(2):
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        evidence.begins(modules.add_root(model), model)
        model(torch.ones(1, 2)).sum().backward()
        for parameter in model.parameters():
            evidence.update_ends(optimizer, parameter)
    names = [name for name in evidence.step.digests if name.startswith("gradient:")]
    parameters = [
        f"gradient:{root}.{name}" for root in modules.roots for name in ("weight", "bias")
    ]
    assert names == parameters


class Cached(torch.nn.Linear):
    """Keeps something that it works out of its weight when that is loaded."""

    def __init__(self) -> None:
        super().__init__(4, 4, device="cuda")
        self.scale = self.weight.detach().abs()
        self.register_load_state_dict_post_hook(lambda *_: self.work_out())

    def work_out(self) -> None:
        self.scale = self.weight.detach().abs()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) @ self.scale


def test_what_is_loaded_on_the_way_lies_where_the_script_would_have_it() -> None:
    with emulate():
        model = Cached()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        request = Request(steps=2, warmup=1, round_trip=True)
        session = Session(request, Setting("emulated", "", str(Path.cwd())))
        with session.watcher:
            for _ in range(request.total):
                model(torch.ones(2, 4, device="cuda")).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            session.step_ends()
        steps = session.finish().steps
    assert any(name.startswith("checkpoint:Cached") for name in steps[-1].digests)
