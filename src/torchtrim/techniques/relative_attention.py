"""Relative attention: position terms that a module materializes as L x L move into the attention kernel.

Modules are recognized by their contents, and each replacement is tried on a copy first
(`torchtrim.attention.replace`). The new forward saves queries, keys and values and recomputes the scores in
backward. The module's contents, and so its `state_dict`, stay.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torchtrim.analysis.positions import Written, replaceable, written_positions
from torchtrim.errors import ApplyFailed, Unsupported
from torchtrim.executor.places import module_at
from torchtrim.executor.registry import Handle, Handles, Option, Roots, TechniqueUnit
from torchtrim.records.operator_names import base_name
from torchtrim.records.plan import Technique
from torchtrim.records.profile import Profile
from torchtrim.step.edits import Edit
from torchtrim.step.rerun import rerun
from torchtrim.step.step import Span, Step

if TYPE_CHECKING:
    from torch import nn

_DRAWS = {"aten::native_dropout", "aten::bernoulli", "aten::bernoulli_"}
Forward = Callable[..., Any]
_NUMBER = re.compile(r"\.\d+(?=\.)")


class ReplaceRelativeAttention(TechniqueUnit):
    """`where` names modules (`Net.blocks.3.attn`); for T5, the layer with the table."""

    name = "relative_attention"
    does = "compute position terms inside the attention kernel"
    equivalence = "ROUNDING"
    assumes = ("the module keeps its code and its layers, and these have no hooks",)

    def options(self, step: Step) -> Sequence[Option]:
        """Return every supported module that materializes positions, except with dropout of probabilities.

        The spans are larger than the recomputed part, so predicted memory and time are upper bounds.
        """
        profile = step.profile
        if profile is None:
            return []
        places: dict[str, dict[int, Written]] = {}
        for one in written_positions(profile):
            if profile.operators[one.at].phase != "recompute":
                places.setdefault(_table_place(profile, one), {})[one.at] = one
        options = []
        for where in replaceable(profile, places):
            spans = tuple(Span(one.first, one.last) for one in places[where].values())
            operators = [op for span in spans for op in profile.operators[span.first : span.last]]
            if not any(base_name(op.name) in _DRAWS for op in operators):
                options.append(Option(self.name, where, spans))
        return options

    def edits(self, step: Step, option: Option) -> Edit | None:
        """Return the edit that recomputes the attention's saved tensors."""
        return rerun(step, option.spans)

    def apply(self, roots: Roots, technique: Technique) -> Handle:
        """Replace the forward of the named modules."""
        from torchtrim.executor.swap import Swapped, is_exported

        replaced = Handles()
        try:
            for where in technique.where:
                for path, module in _with_followers(roots, where):
                    replaced.add(Swapped(module, _forward_of(path, module), is_exported))
        except BaseException:
            replaced.revert()
            raise
        return replaced


TECHNIQUE = ReplaceRelativeAttention()


def _table_place(profile: Profile, one: Written) -> str:
    """Return the module of the softmax, or the module with the table if that is another one."""
    own, table = profile.module_of(one.at), profile.module_of(one.gather)
    return own if f"{table}.".startswith(f"{own}.") else table.rpartition(".")[0]


def _forward_of(path: str, module: nn.Module) -> Callable[[Forward], Forward]:
    from torchtrim.attention.known import dropout_of
    from torchtrim.attention.replace import replacement

    if module.training and (p := dropout_of(module)) > 0:
        raise ApplyFailed(
            f"`{path}` drops probabilities in training (p = {p:g}), and relative_attention draws "
            "different random numbers for that, so the step would differ. Set that dropout to "
            "0, or call torchtrim.attention.relative_attention in its forward."
        )
    try:
        return functools.partial(_while_known, _Known(path, module), replacement(module).wrap)
    except Unsupported as error:
        raise ApplyFailed(f"`{path}` cannot be replaced. {error}") from error


class _Known:
    """The code and the layers of a replaced module."""

    def __init__(self, path: str, module: nn.Module) -> None:
        from torchtrim.capture.code.side_effects import SideEffects

        self.path = path
        self._module = module
        self._layers = list(module.modules())
        self._code = SideEffects([module]).references

    def holds(self) -> bool:
        """Return True if the replacement covers the whole module."""
        from torchtrim.capture.code.hooks import are_all_hooked, hooks_of, is_ours
        from torchtrim.capture.code.side_effects import changed

        hooks = (hook for layer in self._layers[1:] for hook in hooks_of(layer))
        if are_all_hooked() or not all(map(is_ours, hooks)):
            return False
        return not changed(self._code) and self._layers == list(self._module.modules())


def _while_known(known: _Known, wrap: Callable[[Forward], Forward], forward: Forward) -> Forward:
    """Return the new forward, or the module's own once the new one would leave something out."""
    import torch

    from torchtrim.executor.notices import say_once

    if torch.compiler.is_compiling() or known.holds():
        return wrap(forward)
    said = "its layers have hooks, or it has other layers or other code now"
    say_once(
        known.path, f"{said}, so it runs without the plan, and the plan's saving there is lost."
    )
    return forward


def _with_followers(roots: Roots, where: str) -> list[tuple[str, nn.Module]]:
    """Return the module, and the layers at the same place in other blocks, which reuse its bias."""
    name, _, path = where.partition(".")
    first = module_at(roots, where)
    if not hasattr(first, "relative_attention_bias"):
        return [(where, first)]
    others = {
        other: module
        for other, module in roots[name].named_modules()
        if type(module) is type(first) and not hasattr(module, "relative_attention_bias")
    }
    same = [other for other in others if _NUMBER.sub(".*", other) == _NUMBER.sub(".*", path)]
    if others and not same:
        raise ApplyFailed(
            f"`{where}` gives its bias to other layers, and no other block has one at the same "
            f"place; the layers are {', '.join(others)}. Call torchtrim.attention.t5_attention there."
        )
    return [(where, first), *((f"{name}.{other}", others[other]) for other in same)]
