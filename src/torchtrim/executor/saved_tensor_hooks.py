"""Hooks on saved tensors of several techniques at once: autograd runs the innermost alone.

Those that let others be within them are marked; the inner ones hand what they do not keep themselves to them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch.autograd.function import BackwardCFunction

F = TypeVar("F", bound=Callable[..., Any])
Hooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]
_MARK, _OWN = "_torchtrim_chains", "_torchtrim_own"


class Handed(NamedTuple):
    """What the outer hooks made of a tensor."""

    unpack: Callable[[Any], torch.Tensor]
    packed: Any

    def get(self) -> torch.Tensor:
        """The tensor."""
        return self.unpack(self.packed)


def chains(unpack: F) -> F:
    """Mark hooks, by how they unpack, as such that inner ones hand on to."""
    setattr(unpack, _MARK, True)
    return unpack


def own(unpack: F) -> F:
    """Mark hooks, by how they unpack, as a technique's."""
    setattr(unpack, _OWN, True)
    return unpack


def foreign() -> bool:
    """Whether the innermost hooks are the script's: then no technique sees what is saved."""
    top = on_top()
    return top is not None and not (hasattr(top[1], _MARK) or hasattr(top[1], _OWN))


class Lost:
    """Tells once, on stderr, that a technique saves nothing, since hooks of the script are in its way."""

    def __init__(self, technique: str) -> None:
        self._technique = technique
        self._told = False

    def tell(self, where: str) -> None:
        """It would have saved memory at this place."""
        if self._told:
            return
        self._told = True
        print(
            f"torchtrim: {where} runs under hooks on saved tensors that the script has set "
            f"(saved_tensors_hooks, save_on_cpu or a checkpoint), so {self._technique} saves nothing there, "
            "and the peak may pass the plan's budget. The results are not affected. Plan again with these "
            "hooks on from the first step, or take them out.",
            file=sys.stderr,
            flush=True,
        )


def on_top() -> Hooks | None:
    """The innermost hooks that are on."""
    found: Hooks | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return found


def is_chained(hooks: Hooks | None) -> bool:
    """Whether inner hooks may hand on to these."""
    return hooks is not None and hasattr(hooks[1], _MARK)


def when_asked(then: Callable[[], None]) -> None:
    """Do this when a saved tensor was handed out for good: now, or as the backward of a function in Python
    ends, which unpacks all that it saved as often as it looks at `saved_tensors`."""
    node: Any = torch._C._current_autograd_node()
    if not isinstance(node, BackwardCFunction):
        then()
        return

    def ended(*_: Any) -> None:
        handle.remove()
        then()

    handle = node.register_hook(ended)
