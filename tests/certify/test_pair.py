"""Two live steps or two scripts beside each other, and a certificate that is kept."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from torch import nn

import torchtrim
from torchtrim.errors import UnreadableInput, UsageError
from torchtrim.records.certificate import (
    Certificate,
    KeptCertificate,
    Program,
    load_certificate,
    save_certificate,
)
from torchtrim.records.trial import Request
from torchtrim.runner.script import Script
from torchtrim.workflows.verify import check_certificate, judged, verify_pair


class Net(nn.Module):
    """Keeps all that a step may write to: a list, a number, generators, and a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.last = nn.Linear(4, 1)
        self.seen: list[int] = []
        self.average = 0.0
        self.own = torch.Generator().manual_seed(3)
        self.draws = random.Random(5)
        self.kept = torch.zeros(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(len(x))
        self.average = 0.9 * self.average + self.draws.random()
        x = torch.relu(self.first(x))
        self.kept = x.detach().mean(0)
        return self.last(x * torch.rand(4, generator=self.own))


Change = Callable[[Net, torch.Tensor], None]


def step_of(
    change: Change | None = None, inputs: torch.Tensor | None = None
) -> torchtrim.TrainStep:
    torch.manual_seed(0)
    model = Net()

    def loss(model: Net, batch: torch.Tensor) -> torch.Tensor:
        result = model(batch)
        if change is not None:
            change(model, batch)
        return result.square().mean()

    batch = torch.randn(6, 4) if inputs is None else inputs
    return torchtrim.TrainStep(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), batch)


def test_the_same_step_twice_is_the_same() -> None:
    found = torchtrim.assert_same(step_of(), step_of(), steps=1)
    assert found.verdict == "BITWISE"
    assert any(" attributes x " in one for one in found.compared)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda model, _: model.seen.append(0), "Net.seen"),
        (lambda model, _: setattr(model, "average", 0.0), "Net.average.0"),
        (lambda model, _: torch.rand(1, generator=model.own), "Net.own"),
        (lambda model, _: model.draws.random(), "Net.draws"),
        (lambda model, _: setattr(model, "kept", model.kept * 2), "Net.kept.0"),
        (lambda model, _: model.first.eval(), "Net.first.training"),
        (lambda _, __: random.random(), "python"),
    ],
)
def test_what_a_step_writes_beside_tensors_is_compared(change: Change, named: str) -> None:
    found = torchtrim.verify(step_of(), step_of(change), steps=1)
    assert found.verdict == "NOT EQUAL"
    assert found.first_difference is not None
    assert found.first_difference.module == named


class Twins(nn.Module):
    """Two results of each call; `faulty` are the call and the result that differ."""

    def __init__(self, faulty: tuple[int, int] | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.add_module("0", nn.Linear(4, 4))
        self.faulty, self.calls = faulty, 0

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.get_submodule("0")(x)
        found = [x.sin(), x.cos()]
        if self.faulty is not None and self.calls % 2 == self.faulty[0]:
            found[self.faulty[1]] = found[self.faulty[1]] * 1.5
        self.__dict__["calls"] += 1
        return found[0], found[1]


@pytest.mark.parametrize(
    ("faulty", "said"),
    [
        ((0, 0), "output in step 1"),
        ((0, 1), "output [1] in step 1"),
        ((1, 0), "output of call 2 in step 1"),
        ((1, 1), "output [1] of call 2 in step 1"),
    ],
)
def test_a_result_of_a_root_is_called_that(faulty: tuple[int, int], said: str) -> None:
    def step(faulty: tuple[int, int] | None) -> torchtrim.TrainStep:
        model = Twins(faulty)

        def loss(model: Twins, batch: torch.Tensor) -> torch.Tensor:
            return sum((one.square().mean() for _ in range(2) for one in model(batch)), 0.0)

        return torchtrim.TrainStep(
            model, loss, torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(2, 4)
        )

    found = torchtrim.verify(step(None), step(faulty), steps=1)
    assert found.first_difference is not None
    assert found.first_difference.module == "Twins"
    assert found.first_difference.op.startswith(said)


def test_an_input_of_a_root_is_called_that() -> None:
    other = torch.randn(6, 4)
    found = torchtrim.verify(step_of(), step_of(inputs=other), steps=1)
    assert found.first_difference is not None
    assert found.first_difference.op == "input in step 1"
    assert found.first_difference.module == "Net"


def test_what_only_time_decides_counts_for_nothing() -> None:
    ticks = iter(range(1000))

    def stamp(model: Net, _: torch.Tensor) -> None:
        model.stamp = next(ticks)  # type: ignore[assignment]

    found = torchtrim.verify(step_of(stamp), step_of(stamp), steps=1)
    assert found.verdict == "BITWISE"
    assert "attribute:Net.stamp differs between two runs of the original" in found.reason


def test_the_gradient_of_an_input_is_compared() -> None:
    class Cut(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.detach())

    steps = []
    for kind in (Net, Cut):
        torch.manual_seed(0)
        model = kind()
        model.__class__.__name__ = "Net"
        batch = torch.ones(3, 4, requires_grad=True)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        steps.append(
            torchtrim.TrainStep(model, lambda m, b: m(b).sum(), sgd, batch, second_batch=batch)
        )
    with pytest.raises(AssertionError, match="input gradient"):
        torchtrim.assert_same(steps[0], steps[1], steps=1)


def test_one_that_fails_is_not_equal() -> None:
    def fails(model: Net, batch: torch.Tensor) -> None:
        raise ValueError("too wide")

    found = torchtrim.verify(step_of(), step_of(fails), steps=1)
    assert found.verdict == "NOT EQUAL"
    assert "the other fails: ValueError: too wide" in found.reason


def test_a_script_and_a_step_are_no_pair() -> None:
    with pytest.raises(UsageError, match="a script with a script"):
        torchtrim.verify(step_of(), torchtrim.Script("a.py"))


SCRIPT = """\
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
sgd = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(6):
    loss = model(torch.randn(3, 4)).square().mean()
    loss = loss * 1
    loss.backward()
    sgd.step()
    sgd.zero_grad()
"""


@pytest.mark.slow
def test_a_certificate_is_kept_and_repeated(tmp_path: Path) -> None:
    one, other = tmp_path / "one.py", tmp_path / "other.py"
    one.write_text(SCRIPT)
    other.write_text(SCRIPT.replace("loss * 1", "loss / 1"))
    scripts = [torchtrim.Script(str(path), device="cpu") for path in (one, other)]
    result = verify_pair(scripts[0], scripts[1], Request(steps=1))
    assert result.certificate is not None
    assert result.certificate.certificate.verdict == "BITWISE"
    path = tmp_path / "certificate.json"
    save_certificate(msgspec.structs.replace(result.certificate, torch="1.0"), path)
    assert load_certificate(path).results == result.certificate.results
    other.write_text(SCRIPT.replace("loss * 1", "loss * 3"))
    holds, again = check_certificate(path)
    assert not holds
    notes = again.report.notes
    day = result.certificate.made
    assert notes[0] == f"the certificate no longer holds: BITWISE on {day}, NOT EQUAL now"
    assert f"changed since: the text of {other}" in notes
    assert any(one.startswith("changed since: torch, 1.0 then") for one in notes)
    assert not any("the original's results" in one for one in notes)
    first = again.report.certificate.first_difference if again.report.certificate else None
    assert first is not None
    assert (first.other_path, first.other_line) == (str(other), 8)
    assert judged(result.certificate, result.certificate) == (
        True,
        (f"the certificate holds: BITWISE on {day}, BITWISE now",),
    )


KEPT = KeptCertificate(
    certificate=Certificate(
        verdict="BITWISE",
        compared=("1 loss x 4 steps",),
        largest_difference=0.0,
        first_difference=None,
        noise=0.0,
        seeds="script",
        steps=5,
    ),
    original=Program(target="train.py", sha256="a"),
    other=Program(target="other.py", sha256="b"),
    torchtrim="1.0",
    torch="2.13.0",
    python="3.11.7",
    machine="Linux, x86_64, 2 cores, 1 torch threads",
    made="2026-11-20",
    results="2:aa",
)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"made": "2026-11-23"}, ""),
        ({"torchtrim": "1.1"}, "changed since: torchtrim, 1.0 then, 1.1 now"),
        ({"torch": "2.14.0"}, "changed since: torch, 2.13.0 then, 2.14.0 now"),
        (
            {"machine": "Linux, x86_64, 2 cores, 2 torch threads"},
            "changed since: machine, Linux, x86_64, 2 cores, 1 torch threads then, "
            "Linux, x86_64, 2 cores, 2 torch threads now",
        ),
        ({"results": "2:bb"}, "changed since: the original's results, in some bit"),
    ],
)
def test_what_has_changed_is_said_and_the_certificate_holds(
    changed: dict[str, str], said: str
) -> None:
    holds, notes = judged(KEPT, msgspec.structs.replace(KEPT, **changed))
    assert holds
    assert notes[0] == "the certificate holds: BITWISE on 2026-11-20, BITWISE now"
    assert notes[1:] == ((said,) if said else ())


def test_an_older_certificate_is_read_and_its_results_are_not_compared(tmp_path: Path) -> None:
    path = tmp_path / "certificate.json"
    save_certificate(msgspec.structs.replace(KEPT, results="0f" * 16, made=""), path)
    kept = msgspec.json.decode(path.read_bytes())
    del kept["made"]
    path.write_bytes(msgspec.json.encode(kept))
    holds, notes = judged(load_certificate(path), KEPT)
    assert holds
    assert notes[0] == "the certificate holds: BITWISE then, BITWISE now"
    assert "an older one" in notes[1]
    assert len(notes) == 2


THREADED = """import sys
import torch
torch.set_num_threads(int(sys.argv[1]))
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(5):
    model(torch.randn(32, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.slow
def test_another_number_of_threads_another_version_and_another_day(tmp_path: Path) -> None:
    script, path = tmp_path / "threads.py", tmp_path / "certificate.json"
    script.write_text(THREADED)
    scripts = [Script(str(script), ("1",), device="cpu", timeout=120.0) for _ in range(2)]
    result = verify_pair(scripts[0], scripts[1], Request(steps=1))
    assert result.certificate is not None
    kept = msgspec.structs.replace(
        result.certificate,
        original=msgspec.structs.replace(result.certificate.original, args=("2",)),
        other=msgspec.structs.replace(result.certificate.original, args=("2",)),
        torchtrim="0.0.1",
        torch="2.0.0",
        made="2020-02-02",
        machine="another machine with another number of threads",
    )
    save_certificate(kept, path)
    holds, again = check_certificate(path, timeout=120.0)
    notes = again.report.notes
    assert holds
    assert notes[0] == "the certificate holds: BITWISE on 2020-02-02, BITWISE now"
    for what in ("torchtrim, 0.0.1 then", "torch, 2.0.0 then", "machine, another machine"):
        assert any(one.startswith(f"changed since: {what}") for one in notes)


def test_what_is_no_certificate_is_said(tmp_path: Path) -> None:
    path = tmp_path / "certificate.json"
    path.write_text('{"certificate": 3}')
    with pytest.raises(UnreadableInput, match="not a readable certificate"):
        check_certificate(path)


def test_calls_of_modules_and_of_their_hooks_are_counted() -> None:
    def hooked(model: Net, _: torch.Tensor) -> None:
        model.first.register_forward_hook(lambda *_: None)

    def again(model: Net, batch: torch.Tensor) -> None:
        model.first(batch)

    for change in (hooked, again):
        found = torchtrim.verify(step_of(), step_of(change), steps=1)
        assert found.verdict == "NOT EQUAL"
        assert found.first_difference is not None
        # Called from outside, the layer is a root of its own.
        where = ("call", "Net.first") if change is hooked else ("initial state", "Linear.weight")
        assert found.first_difference.op.startswith(f"{where[0]} in step")
        assert found.first_difference.module == where[1]


def test_an_exception_that_the_step_catches_is_compared() -> None:
    def raises(kind: type[Exception]) -> Change:
        def change(model: Net, batch: torch.Tensor) -> None:
            handle = model.last.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(kind))
            with contextlib.suppress(kind):
                model(batch)
            handle.remove()

        return change

    same = torchtrim.verify(step_of(raises(ValueError)), step_of(raises(ValueError)), steps=1)
    assert same.verdict == "BITWISE"
    found = torchtrim.verify(step_of(raises(ValueError)), step_of(raises(KeyError)), steps=1)
    assert found.verdict == "NOT EQUAL"
    assert "exception:Net" in found.reason


def test_what_is_left_behind_after_each_step_is_compared() -> None:
    kept: list[torch.Tensor] = []

    def keeps(_: Net, batch: torch.Tensor) -> None:
        kept.append(torch.zeros(5000))

    found = torchtrim.verify(step_of(), step_of(keeps), steps=3)
    assert found.verdict == "NOT EQUAL"
    assert "more memory is live after each step" in found.reason
    assert len(kept) > 3
    assert torchtrim.verify(step_of(keeps), step_of(keeps), steps=3).verdict == "BITWISE"


def test_models_and_optimizers_save_and_load_on_the_way(tmp_path: Path) -> None:
    one, other = tmp_path / "one.py", tmp_path / "other.py"
    one.write_text(SCRIPT)
    bare = "model[0].state_dict = lambda *args, **kwargs: kwargs['destination']\nfor _ in"
    other.write_text(SCRIPT.replace("for _ in", bare))
    scripts = [torchtrim.Script(str(path), device="cpu") for path in (one, other)]
    found = verify_pair(scripts[0], scripts[1], Request(steps=1)).report.certificate
    assert found is not None
    assert found.verdict == "NOT EQUAL"
    assert found.first_difference is not None
    assert found.first_difference.op.startswith("checkpoint in step")


DRAWS = """import random
import time
import numpy as np
import torch
from torch import nn
torch.manual_seed(0)
shuffler, spare, clock = np.random.default_rng(7), random.Random(3), random.Random(time.time_ns())
model = nn.Linear(4, 1)
sgd = torch.optim.SGD(model.parameters(), lr=0.1)
def train(shuffler, data):
    for _ in range(6):
        loss = model(data).square().mean()
        loss.backward()
        sgd.step()
        sgd.zero_grad()
        shuffler.random()
        spare.random()
train(shuffler, torch.randn(3, 4))
"""
ONCE_MORE = DRAWS.replace("        shuffler.random()\n", "        shuffler.random(2)\n")


def drawn(folder: Path, one: str, other: str) -> Certificate:
    """The certificate of two scripts that draw numbers."""
    scripts = []
    for name, text in (("one", one), ("other", other)):
        (folder / f"{name}.py").write_text(text)
        scripts.append(torchtrim.Script(str(folder / f"{name}.py"), device="cpu"))
    return torchtrim.verify(*scripts, steps=1)


@pytest.mark.parametrize(
    "other", [ONCE_MORE, ONCE_MORE.replace("shuffler", "numbers").replace("train", "fit")]
)
def test_a_number_more_from_a_generator_of_the_script_is_seen(tmp_path: Path, other: str) -> None:
    found = drawn(tmp_path, DRAWS, other)
    assert found.verdict == "NOT EQUAL"
    assert found.first_difference is not None
    assert "script generator" in found.first_difference.op
    assert found.first_difference.module == "train.shuffler"


def test_other_names_of_generators_and_one_seeded_by_the_clock_are_no_difference(
    tmp_path: Path,
) -> None:
    renamed = DRAWS.replace("shuffler", "numbers").replace("train", "fit").replace("spare", "left")
    found = drawn(tmp_path, DRAWS, renamed)
    assert found.verdict == "BITWISE"
    assert any("script generators" in one for one in found.compared)
    assert "clock differs between two runs of the original" in found.reason
