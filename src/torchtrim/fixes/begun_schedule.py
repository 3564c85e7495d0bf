"""A sampler's loop over `scheduler.timesteps` starts with `scheduler.set_begin_index(0)`.

The first `scheduler.step` of a diffusers scheduler searches for its time step on the device, and reads the
index. A loop over all time steps starts at the first, so the host knows the index.

Needs a diffusers scheduler with `set_begin_index`, and a loop over all of its time steps that calls `step`.
Refused if the function sets the index elsewhere.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from torchtrim.rewriter.fix import Fix, Match, Writing
from torchtrim.rewriter.replace import above
from torchtrim.source.facts import Facts, FixRefused
from torchtrim.source.forms import match_form
from torchtrim.source.nodes import find_all, name_set
from torchtrim.source.operations import is_simple
from torchtrim.source.source import SourceFile

_SCHEDULERS = name_set("""
    DEISMultistepScheduler DPMSolverMultistepScheduler DPMSolverSDEScheduler DPMSolverSinglestepScheduler
    EDMDPMSolverMultistepScheduler EDMEulerScheduler EulerAncestralDiscreteScheduler EulerDiscreteScheduler
    FlowMatchEulerDiscreteScheduler FlowMatchHeunDiscreteScheduler HeunDiscreteScheduler
    KDPM2AncestralDiscreteScheduler KDPM2DiscreteScheduler LCMScheduler LMSDiscreteScheduler
    SASolverScheduler TCDScheduler UniPCMultistepScheduler
""")
_LOOPS = ("S.timesteps", "enumerate(S.timesteps)")


def _find(source: SourceFile) -> Iterator[Match]:
    for node in source.each(ast.For):
        bound = next(filter(None, (match_form(form, node.iter, source) for form in _LOOPS)), None)
        if bound is None or not is_simple(bound.parts["S"]):
            continue
        step = f"{ast.unparse(bound.parts['S'])}.step"
        calls = find_all(node, ast.Call)
        first = next((call for call in calls if ast.unparse(call.func) == step), None)
        if first is not None:
            yield Match(fix=FIX, source=source, node=first, parts=bound.parts, begin=node)


def _write(match: Match, facts: Facts) -> Writing:
    source, loop = match.source, match.begin
    assert isinstance(loop, ast.For)
    facts.need(
        f"`{match.text('S')[:60]}` is a diffusers scheduler with `set_begin_index`",
        lambda v: v.S.kind in _SCHEDULERS,
    )
    setter = "set_begin_index"
    if any(getattr(one, "attr", "") == setter for one in ast.walk(source.function(loop))):
        raise FixRefused("the function already sets the index")
    return Writing((above(source, loop, f"{match.text('S')}.{setter}(0)"),))


FIX: Fix = Fix(codes=("TT101", "TT102"), equivalence="BITWISE", find=_find, write=_write)
