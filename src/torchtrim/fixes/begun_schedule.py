"""A sampler's loop over `scheduler.timesteps` says where it begins: `scheduler.set_begin_index(0)` before it.

The first `scheduler.step` of a diffusers scheduler looks for its time step among all of them, on the device,
and reads the place. A loop over all of them begins at the first, so the host knows it.

Needs a scheduler of diffusers that has `set_begin_index`, and a loop over all of its time steps in which it
steps; refused where the function sets it elsewhere.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from torchtrim.rewriter.fix import Edit, Fix, Match, Writing
from torchtrim.rewriter.replace import check_comments
from torchtrim.source.facts import Facts, Refused
from torchtrim.source.forms import match_form
from torchtrim.source.purity import is_simple
from torchtrim.source.source import Source

_SCHEDULERS_NAMES = """
    DEISMultistepScheduler DPMSolverMultistepScheduler DPMSolverSDEScheduler DPMSolverSinglestepScheduler
    EDMDPMSolverMultistepScheduler EDMEulerScheduler EulerAncestralDiscreteScheduler EulerDiscreteScheduler
    FlowMatchEulerDiscreteScheduler FlowMatchHeunDiscreteScheduler HeunDiscreteScheduler
    KDPM2AncestralDiscreteScheduler KDPM2DiscreteScheduler LCMScheduler LMSDiscreteScheduler
    SASolverScheduler TCDScheduler UniPCMultistepScheduler
"""
_SCHEDULERS = frozenset(_SCHEDULERS_NAMES.split())
_LOOPS = ("S.timesteps", "enumerate(S.timesteps)")


def find(source: Source) -> Iterator[Match]:
    """Loops over all time steps of something that steps in them."""
    for node in source.nodes:
        if not isinstance(node, ast.For):
            continue
        bound = next(filter(None, (match_form(form, node.iter, source) for form in _LOOPS)), None)
        if bound is None or not is_simple(bound.parts["S"]):
            continue
        step = f"{ast.unparse(bound.parts['S'])}.step"
        calls = (one for one in ast.walk(node) if isinstance(one, ast.Call))
        first = next((call for call in calls if ast.unparse(call.func) == step), None)
        if first is not None:
            yield Match(fix=FIX, source=source, node=first, parts=bound.parts, begin=node)


def write(match: Match, facts: Facts) -> Writing:
    """The loop with where it begins before it."""
    source, loop = match.source, match.begin
    assert loop is not None
    facts.need(
        f"`{match.text('S')[:60]}` is a scheduler of diffusers that can be told where it begins",
        lambda v: v.S.kind in _SCHEDULERS,
    )
    told = "set_begin_index"
    if any(getattr(one, "attr", "") == told for one in ast.walk(source.function(loop))):
        raise Refused("the function says where it begins")
    blanks = source.indentation(loop)  # type: ignore[arg-type]
    if blanks is None:
        raise Refused("the loop shares its line with another statement. Give each its own line")
    start = source.line_start(loop.lineno)  # type: ignore[attr-defined]
    text = f"{blanks}{match.text('S')}.{told}(0){source.newline}"
    edits = (Edit(start, start, text),)
    check_comments(source, edits)
    return Writing(edits)


FIX: Fix = Fix(codes=("TT101", "TT102"), equivalence="BITWISE", find=find, write=write)
