"""LSTMs and GRUs in pieces of time: equal up to rounding in every form, the peak falls to what was said."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

import torchtrim
from steps import train_step
from torchtrim.errors import ApplyFailed
from torchtrim.executor.swap import Swapped
from torchtrim.records.budget import memory_limit
from torchtrim.records.plan import Technique
from torchtrim.records.terms import Terms
from torchtrim.records.trial import Request
from torchtrim.step.from_profile import step_of
from torchtrim.step.simulate import simulate
from torchtrim.step.step import Step
from torchtrim.techniques.split_time.layers import layers_of
from torchtrim.techniques.split_time.running import LstmCell
from torchtrim.techniques.split_time.technique import _TURN_SECONDS, TECHNIQUE
from torchtrim.workflows.optimize.fitting import Fitting

KINDS: dict[str, Any] = {"LSTM": nn.LSTM, "GRU": nn.GRU}
FORMS = list(
    itertools.product(
        tuple(KINDS), (1, 2), (False, True), (False, True), (True, False), (True, False), (1, 4, 11)
    )
)


class Own(nn.LSTM):
    """An LSTM with a forward of its own."""

    def forward(self, input: Tensor, hx: Any = None) -> Any:
        return super().forward(2 * input, hx)


class Cells(nn.Module):
    """Cells of torch in a loop of the user's, in a class that has the name of a layer."""

    def __init__(self, given: int, hidden_size: int) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(given, hidden_size)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        hidden = cell = x.new_zeros(x.shape[1], self.cell.hidden_size)
        out = []
        for one in x:
            hidden, cell = self.cell(one, (hidden, cell))
            out.append(hidden)
        return torch.stack(out), None


@contextmanager
def suppress_no_kernel() -> Iterator[None]:
    """Pass over what oneDNN cannot run on this processor, such as an LSTM in bfloat16 without AVX-512."""
    try:
        yield
    except RuntimeError as error:
        if "could not create a primitive" not in str(error):
            raise


class Cast(nn.Module):
    """A recurrent layer under autocast."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            guess: Tensor = self.net(x).float()
        return guess


def part_of(*where: str, **options: Any) -> Technique:
    return Technique(name="split_time", where=where, options=options, equivalence="ROUNDING")


class Reader(nn.Module):
    """A recurrent layer, and a guess at each step."""

    def __init__(self, kind: str, **words: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.recurrent = KINDS[kind](24, **{"hidden_size": 64, **words})
        self.head = nn.Linear(128 if words.get("bidirectional") else 64, 4)

    def forward(self, x: Tensor) -> Tensor:
        guess: Tensor = self.head(self.recurrent(x)[0])
        return guess


def flattened(module: nn.RNNBase, given: Tensor, states: tuple[Tensor, ...]) -> list[Tensor]:
    """Results and all gradients."""
    hx: Any = None
    if states:
        hx = states if isinstance(module, nn.LSTM) else states[0]
    out, last = module(given, hx)
    ends = last if isinstance(last, tuple) else (last,)
    loss = (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)).sum()
    loss = loss + sum((one * one).sum() for one in ends)
    used = states if isinstance(module, nn.LSTM) else states[:1]
    return [out, *ends, *torch.autograd.grad(loss, [given, *used, *module.parameters()])]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.slow
def test_every_form_is_the_same_up_to_rounding(kind: str) -> None:
    for name, layers, both, batch_first, bias, begun, steps in FORMS:
        if name != kind:
            continue
        torch.manual_seed(0)
        module = KINDS[kind](
            5,
            7,
            layers,
            bidirectional=both,
            batch_first=batch_first,
            bias=bias,
            dtype=torch.float64,
        )
        shape = (3, steps, 5) if batch_first else (steps, 3, 5)
        given = torch.randn(shape, dtype=torch.float64, requires_grad=True)
        first = (layers * (1 + both), 3, 7)
        states = [torch.randn(first, dtype=torch.float64, requires_grad=True) for _ in "hc"]
        known = tuple(states) if begun else ()
        plain = flattened(module, given, known)
        handle = TECHNIQUE.apply({"Net": module}, part_of("Net"))
        for one, two in zip(plain, flattened(module, given, known), strict=True):
            torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-12)
        handle.revert()
        for one, two in zip(plain, flattened(module, given, known), strict=True):
            assert torch.equal(one, two)


def test_frozen_weights_get_no_gradient() -> None:
    module = nn.LSTM(5, 7)
    module.weight_hh_l0.requires_grad_(False)
    TECHNIQUE.apply({"Net": module}, part_of("Net"))
    module(torch.randn(4, 3, 5))[1][1].sum().backward()
    assert module.weight_hh_l0.grad is None
    assert module.weight_ih_l0.grad is not None


def test_calls_that_are_not_for_it_run_as_they_are() -> None:
    module, given = nn.GRU(5, 7, batch_first=True), torch.randn(3, 4, 5)
    packed = pack_padded_sequence(given, torch.tensor([4, 2, 1]), batch_first=True)

    def calls() -> list[Tensor]:
        with torch.no_grad():
            found = [module(given)[0]]
        with torch.autocast("cpu", torch.bfloat16):
            found.append(module(given)[0])
        return [*found, module(packed)[0].data, module(given[0])[0]]

    before = calls()
    TECHNIQUE.apply({"Net": module}, part_of("Net"))
    for one, two in zip(before, calls(), strict=True):
        assert torch.equal(one, two)


def test_a_wrong_first_state_is_an_error_as_ever() -> None:
    module = nn.LSTM(5, 7)
    TECHNIQUE.apply({"Net": module}, part_of("Net"))
    with pytest.raises(RuntimeError, match=r"Expected hidden\[0\] size"):
        module(torch.randn(4, 3, 5), (torch.zeros(1, 2, 7), torch.zeros(1, 2, 7)))


def test_what_cannot_run_in_pieces_is_refused() -> None:
    with pytest.raises(ApplyFailed, match="has no options"):
        TECHNIQUE.apply({}, part_of("Net", parts=2))
    for module, why in (
        (nn.Linear(2, 2), "not an LSTM or a GRU"),
        (Own(4, 4), "its own forward"),
        (nn.LSTM(4, 4, proj_size=2), "projections"),
        (nn.LSTM(4, 4, 2, dropout=0.1), "random numbers"),
        (with_own_forward(), "its own forward"),
        (changed(), "changed by another technique"),
    ):
        with pytest.raises(ApplyFailed, match=why):
            TECHNIQUE.apply({"Net": module}, part_of("Net"))


def with_own_forward() -> nn.LSTM:
    module = nn.LSTM(4, 4)
    plain = module.forward
    module.forward = lambda x, hx=None: plain(2 * x, hx)  # type: ignore[method-assign]
    return module


def changed() -> nn.LSTM:
    module = nn.LSTM(4, 4)
    Swapped(module, lambda forward: forward)
    return module


@pytest.mark.parametrize("kind", KINDS)
def test_it_cannot_be_differentiated_twice_and_says_so(kind: str) -> None:
    module, given = KINDS[kind](4, 4), torch.randn(3, 2, 4, requires_grad=True)
    TECHNIQUE.apply({"Net": module}, part_of("Net"))
    with pytest.raises(ApplyFailed, match="split_time cannot be differentiated twice"):
        torch.autograd.grad(module(given)[0].sum(), given, create_graph=True)


def test_a_replica_computes_with_its_own_weights() -> None:
    module = nn.LSTM(4, 4)
    TECHNIQUE.apply({"Net": module}, part_of("Net"))
    replica = module._replicate_for_data_parallel()
    for name, parameter in module.named_parameters():
        setattr(replica, name, torch.zeros_like(parameter))
    assert not replica(torch.randn(3, 2, 4))[0].any()


def recorded(step: torchtrim.TrainStep) -> tuple[Step, int]:
    trial = Fitting(step, Request(steps=1), lambda _: None).observe()
    assert trial.profile is not None
    return step_of(trial.profile, trial.seconds), trial.peak_bytes


NETWORKS: dict[str, tuple[str, dict[str, Any]]] = {
    "lstm": ("LSTM", {}),
    "batch first": ("LSTM", {"batch_first": True}),
    "gru": ("GRU", {}),
    "layers": ("LSTM", {"num_layers": 2}),
    "both ways": ("GRU", {"bidirectional": True}),
    "short": ("LSTM", {"steps": 3}),
}


@pytest.mark.parametrize("network", NETWORKS)
def test_the_peak_falls_to_what_was_said(network: str) -> None:
    kind, words = NETWORKS[network]
    words = dict(words)
    steps = words.pop("steps", 12)
    net = Reader(kind, **words)
    shape = (128, steps, 24) if words.get("batch_first") else (steps, 1536 // steps, 24)
    step = train_step(net, torch.randn(shape), "SGD")
    whole, before = recorded(step)
    (option,) = TECHNIQUE.options(whole)
    edit = TECHNIQUE.edits(whole, option)
    assert edit is not None
    saved = before - simulate(whole, [edit]).peak_bytes
    assert saved > 0.3 * before
    TECHNIQUE.apply({"Reader": net}, part_of(option.where))
    _, after = recorded(step)
    assert after == pytest.approx(before - saved, rel=0.03)


def test_bytes_are_of_the_type_of_what_goes_in() -> None:
    found = []
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        net, given = Reader("LSTM").to(dtype), torch.randn(12, 8, 24, dtype=dtype)
        whole, _ = recorded(train_step(net, given, "SGD"))
        ((one,),) = layers_of(whole).values()
        found.append([size / dtype.itemsize for size in (one.kept_bytes, *one.within)])
    assert found[0] == found[1] == found[2]


def test_time_steps_of_all_layers_and_directions_take_their_time() -> None:
    net = Reader("LSTM", num_layers=2, bidirectional=True)
    whole, _ = recorded(train_step(net, torch.randn(40, 2, 24), "SGD"))
    for seconds in (0.0, 1.0):
        step = replace(whole, tasks=tuple(one._replace(seconds=seconds) for one in whole.tasks))
        (option,) = TECHNIQUE.options(step)
        edit = TECHNIQUE.edits(step, option)
        assert edit is not None
        ((first, last),) = option.spans
        more = 0.0 if seconds else 40 * 2 * 2 * _TURN_SECONDS
        assert edit.work_seconds == pytest.approx((last - first) * seconds + more)


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
def test_what_it_is_not_for_is_not_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KINDS, "Cells", type("LSTM", (Cells,), {}))
    for net in (
        Reader("LSTM", num_layers=2, dropout=0.2),
        Reader("LSTM", hidden_size=96, proj_size=64),
        Reader("Cells"),
        Cast(Reader("LSTM")),
        Cast(Reader("GRU")),
    ):
        with suppress_no_kernel():
            whole, _ = recorded(train_step(net, torch.randn(8, 4, 24), "SGD"))
            assert not TECHNIQUE.options(whole)


def test_where_it_is_refused_it_is_planned_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KINDS, "Own", type("LSTM", (Own,), {}))
    step = train_step(Reader("Own"), torch.randn(40, 16, 24), "SGD")
    terms = Terms(exclude=("recompute", "replay", "micro_batch", "split_batch"), allow="ROUNDING")
    fit = Fitting(step, Request(steps=2), lambda _: None, terms).nearest(memory_limit("60%"))
    assert fit.missed is not None
    assert any("its own forward" in note for note in fit.notes)


@pytest.mark.slow
def test_it_is_chosen_and_a_fault_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    step: torchtrim.TrainStep = train_step(Reader("LSTM"), torch.randn(40, 16, 24), "SGD")
    others = ("recompute", "replay", "micro_batch", "split_batch", "optimizer_in_backward")
    terms = Terms(exclude=others, allow="ROUNDING")
    fitting = Fitting(step, Request(steps=2), lambda _: None, terms)
    fit = fitting.nearest(memory_limit("60%"))
    assert fit.missed is None
    assert fit.certificate is not None
    assert {one.name for one in fit.plan.techniques} == {"split_time"}
    assert fit.certificate.verdict == "ROUNDING", fit.certificate.reason
    right = LstmCell.backward

    def wrong(*given: Any) -> Any:
        found = right(*given)
        return found._replace(before=found.before._replace(cell=found.before.cell * 0.9))

    monkeypatch.setattr(LstmCell, "backward", staticmethod(wrong))
    assert fitting.verify(fit.original, fit.plan).verdict == "NOT EQUAL"
