"""What a script compiles is run eagerly: inside a compiled graph nothing can be seen or planned."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

NOTE = (
    "the script uses torch.compile: what it compiles was run eagerly here, and every figure is of that. "
    "A plan holds for eager runs too, and `torchtrim run` runs it so"
)


class Eagerly:
    """From `install` on, `torch.compile` gives what it always does, and calling that compiles nothing.

    `asked` tells whether the script ever compiled, `told` is called when it first does.
    """

    def __init__(self, told: Callable[[], None] = lambda: None) -> None:
        self.asked = False
        self._told = told

    def install(self) -> None:
        """Stand in for `torch.compile`, the decorator too, and for `Module.compile`."""
        original = torch.compile

        @functools.wraps(original)
        def compile_nothing(model: Any = None, **options: Any) -> Any:
            self._ask()
            for unused in ("backend", "mode", "options"):
                options.pop(unused, None)
            return original(model, backend="eager", **options)

        @functools.wraps(nn.Module.compile)
        def stay_eager(_module: nn.Module, *_: Any, **__: Any) -> None:
            self._ask()

        self._instead = torch.compile, nn.Module.compile
        torch.compile = compile_nothing
        nn.Module.compile = stay_eager  # type: ignore[assignment, method-assign]

    def remove(self) -> None:
        """What `install` replaced is there again."""
        torch.compile, nn.Module.compile = self._instead  # type: ignore[method-assign]
        if self.asked:
            torch.compiler.set_stance("default")

    def _ask(self) -> None:
        if not self.asked:
            self.asked = True
            torch.compiler.set_stance("force_eager")
            self._told()
