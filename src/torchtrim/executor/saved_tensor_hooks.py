"""Chain the saved-tensor hooks of several techniques, since autograd runs only the innermost hooks.

Chainable outer hooks are marked. Inner hooks pass on the tensors that they do not handle themselves.
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
    """A tensor packed by outer hooks."""

    unpack: Callable[[Any], torch.Tensor]
    packed: Any

    def get(self) -> torch.Tensor:
        """Return the tensor."""
        return self.unpack(self.packed)


def chains(unpack: F) -> F:
    """Mark hooks, by their unpack function, as chainable."""
    setattr(unpack, _MARK, True)
    return unpack


def own(unpack: F) -> F:
    """Mark hooks, by their unpack function, as a technique's."""
    setattr(unpack, _OWN, True)
    return unpack


def foreign() -> bool:
    """True if the innermost hooks are the script's, which hide saved tensors from techniques."""
    top = on_top()
    return top is not None and not (hasattr(top[1], _MARK) or hasattr(top[1], _OWN))


class Lost:
    """Warns once, on stderr, that the script's own hooks keep a technique from saving memory."""

    def __init__(self, technique: str) -> None:
        self._technique = technique
        self._told = False

    def tell(self, where: str) -> None:
        """Warn that nothing is saved at this place."""
        if self._told:
            return
        self._told = True
        print(
            f"torchtrim: {where} runs under hooks on saved tensors that the script has set "
            f"(saved_tensors_hooks, save_on_cpu or a checkpoint), so {self._technique} saves nothing there, "
            "and the peak may pass the plan's budget. The results are not affected. Plan again with these "
            "hooks on from the first step, or remove them.",
            file=sys.stderr,
            flush=True,
        )


def on_top() -> Hooks | None:
    """Return the innermost active hooks."""
    found: Hooks | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return found


def is_chained(hooks: Hooks | None) -> bool:
    """True if inner hooks may pass tensors on to these."""
    return hooks is not None and hasattr(hooks[1], _MARK)


def when_asked(then: Callable[[], None]) -> None:
    """Call `then` after the last unpack of a saved tensor.

    That is now, or at the end of the backward of a Python function, which unpacks all its tensors at each
    access to `saved_tensors`.
    """
    node: Any = torch._C._current_autograd_node()
    if not isinstance(node, BackwardCFunction):
        then()
        return

    def ended(*_: Any) -> None:
        handle.remove()
        then()

    handle = node.register_hook(ended)
