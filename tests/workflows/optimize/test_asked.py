"""What a person asks for: techniques that are measured, their pins, and a share of a script that compiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from profiles import exchanging_step
from report import samples
from torchtrim.errors import Unsupported, UsageError
from torchtrim.records.budget import memory_limit
from torchtrim.records.profile import CompiledFunction
from torchtrim.records.report import Result
from torchtrim.records.terms import BITWISE, allowance
from torchtrim.records.trial import CompiledMemory, Request, Trial, TrialStep
from torchtrim.runner.script import Script
from torchtrim.workflows import compiled
from torchtrim.workflows.optimize import report
from torchtrim.workflows.optimize.fitting import Fitting
from torchtrim.workflows.optimize.levers import may_shard
from torchtrim.workflows.optimize.trials import choices, pinned_choice


def job(ranks: int) -> Trial:
    """Replicas on so many ranks; sums over more than two may be rounded otherwise in shards."""
    profile = exchanging_step([(2**20, 0.3), (3 * 2**20, 0.5)])
    collectives = tuple(msgspec.structs.replace(one, ranks=ranks) for one in profile.collectives)
    profile = msgspec.structs.replace(profile, world=ranks, collectives=collectives)
    alone = Trial(request=Request(), profile=profile)
    return msgspec.structs.replace(alone, ranks=(alone,) * ranks)


@pytest.mark.parametrize(
    ("ranks", "allow", "ways"), [(2, "bitwise", 2), (4, "bitwise", 0), (4, "rounding", 2)]
)
def test_ways_that_round_are_tried_where_that_is_allowed(ranks: int, allow: str, ways: int) -> None:
    original = job(ranks)
    assert len(choices(original, ["shard"], (), allowance(allow))) == ways
    assert may_shard(original, allowance(allow), ()) == bool(ways)
    assert not may_shard(original, allowance(allow), ("shard",))


def test_a_pin_that_rounds_asks_for_what_allows_it() -> None:
    pins = {"shard": ["DDP"]}
    with pytest.raises(UsageError, match="shard, which rounds here: give --allow rounding too"):
        pinned_choice(job(4), pins, allowance("bitwise"))
    (pinned,) = pinned_choice(job(4), pins, allowance("rounding"))
    assert (pinned.name, pinned.where, pinned.equivalence) == ("shard", ("DDP",), "ROUNDING")


def test_a_pin_that_makes_another_function_has_to_be_named() -> None:
    pins = {"compress_gradients": ["DDP"]}
    with pytest.raises(UsageError, match="give --allow semantic=compress_gradients too"):
        pinned_choice(job(2), pins, allowance("rounding"))


def _fit(
    monkeypatch: pytest.MonkeyPatch, peak: int, graphs_of: Callable[..., Any] | None = None
) -> Any:
    """The answer of planning a script's graphs, if it needs `peak` compiled, and no plan of theirs helps."""
    request = Request(steps=2)
    eager = Trial(request=request, backends=("inductor",), steps=[TrialStep(peak_bytes=9000)])
    original = Trial(request=request, steps=[TrialStep(peak_bytes=peak)] * 2)
    memory = CompiledMemory(
        calls=1,
        saved_bytes=0,
        peak_bytes=peak,
        graphs=(),
        planned_peak=peak,
        plan=(),
        added_seconds=0.0,
        unmeasured=(),
    )
    monkeypatch.setattr(compiled, "run_once", lambda *_: original)
    monkeypatch.setattr(compiled, "graphs_of", graphs_of or (lambda *_: memory))
    fitting = Fitting(Script(__file__), request, print, BITWISE)
    monkeypatch.setattr(fitting, "observe", lambda: eager)
    return report._compiled(fitting, memory_limit("60%"), request, BITWISE, print)


def test_a_share_of_an_eager_plan_is_one_of_what_the_script_needs_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limit, (note,) = _fit(monkeypatch, 5000)
    assert "over the budget" in note
    assert limit.budget(9000).bytes == 3000
    assert limit.asked == "60%"
    assert "planned eagerly" in note


def test_a_compiled_run_that_shows_no_step_fits_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    limit, (note,) = _fit(monkeypatch, 0)
    assert limit == memory_limit("60%")
    assert "Compile the model itself" in note
    with pytest.raises(Unsupported, match="no step was seen"):
        compiled.optimize_compiled(Script(__file__), limit, Request(), print)


def test_an_error_of_torch_is_told_by_its_first_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise Unsupported("LoweringException: no strides\n  target: aten.view\n  args[0]: x")

    _, (note,) = _fit(monkeypatch, 5000, fails)
    assert note.endswith("were not: LoweringException: no strides")
    known = Result(samples.DIAGNOSE)
    told = compiled.with_compiled(known, Script(__file__), Request(steps=2), print).report
    assert told.notes[0].endswith("not known: LoweringException: no strides")


def test_what_is_compiled_again_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    again = CompiledFunction(
        function="forward", path="", line=0, steps=5, watched=5, seconds=8.0, guard="t == 2"
    )
    memory = CompiledMemory(calls=1, saved_bytes=0, peak_bytes=0, graphs=())
    ran = Trial(request=Request(), steps=[TrialStep(peak_bytes=1)] * 2, again=(again,))
    monkeypatch.setattr(compiled, "graphs_of", lambda *_: memory)
    monkeypatch.setattr(compiled, "run_once", lambda *_: ran)
    eager = Result(samples.DIAGNOSE, exchanging_step([(2**20, 0.3)]))
    result = compiled.with_compiled(eager, Script(__file__), Request(), print)
    assert result.before is not None
    assert result.before.compiled == [again]
    (finding,) = (one for one in result.report.findings if one.code == "TT403")
    assert finding.price_ms == pytest.approx(2000)
    assert len(result.report.findings) == len(samples.DIAGNOSE.findings) + 1
