"""Backwards of our own can be differentiated no further, and say so."""

from __future__ import annotations

import torch


def only_once(name: str) -> None:
    """Raises `RuntimeError` in a backward that is to be differentiated again.

    `torch.autograd.function.once_differentiable` does where the gradient that comes needs one itself; where
    it does not, as that of a sum, what a second backward gives would silently lack a part.
    """
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"{name} cannot be differentiated twice: `create_graph=True` went through it. Take it out of the "
            "plan or the program."
        )
