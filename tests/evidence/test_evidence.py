from __future__ import annotations

import copy
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


def test_a_step_of_stacked_networks_under_vmap_is_compared() -> None:
    """Parameters of the optimizer are no module's, and the module that computes holds stand-ins."""
    torch.manual_seed(0)
    nets = [torch.nn.Linear(4, 1) for _ in range(3)]
    stacked, _ = torch.func.stack_module_state(nets)
    given = {name: one.detach().requires_grad_() for name, one in stacked.items()}
    base = copy.deepcopy(nets[0]).to("meta")

    def called(own: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = torch.func.functional_call(base, own, (x,))
        return found

    session = Session(Request(steps=1), Setting("cpu", "stacked", "."))
    with session.watcher:
        optimizer = torch.optim.Adam(list(given.values()), 0.1)
        for _ in range(4):
            optimizer.zero_grad()
            torch.vmap(called, in_dims=(0, None))(given, torch.ones(2, 4)).square().sum().backward()
            optimizer.step()
    trial = session.finish()
    assert (trial.fingerprint, trial.forwards > 0) == ({}, True)
    assert trial.profile is not None
    names = [name for name in trial.steps[0].digests if name.startswith("gradient:")]
    assert names == ["gradient:Adam.0", "gradient:Adam.1"]


def test_a_parameter_keeps_its_number_where_a_plan_cuts_the_groups() -> None:
    evidence = Evidence(Modules())
    weights = [torch.ones(2, requires_grad=True) for _ in range(3)]
    sum(weight.sum() for weight in weights).backward()  # type: ignore[union-attr]
    optimizer = torch.optim.SGD(weights, 0.1)
    evidence.numbered(optimizer)
    (group,) = optimizer.param_groups
    for part in (weights[:2], weights[2:]):
        optimizer.param_groups = [{**group, "params": part}]
        evidence.optimizer_ends(optimizer)
    assert list(evidence.step.digests) == [f"gradient:SGD.{number}" for number in range(3)]
