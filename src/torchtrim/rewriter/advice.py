"""Host-device syncs that a library makes, and the line of configuration that ends them.

The line is in the user's program, or in the setting of the library that makes the sync; the source is not
edited, since what it means to the program only its author knows.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from torchtrim.source.source import Source


@dataclass(frozen=True, kw_only=True)
class Advice:
    """What to write instead. `places` are ends of paths and names of functions of the library that waits,
    `calls` the names that the user's own source calls, after the module `of` if one is given."""

    name: str
    line: str
    why: str
    places: tuple[tuple[str, str], ...] = ()
    calls: tuple[str, ...] = ()
    of: str = ""


class Advised(NamedTuple):
    """Advice for a line of user code."""

    line: int
    advice: Advice


ADVICE = (
    Advice(
        name="grad-scaler",
        line='torch.autocast("cuda", dtype=torch.bfloat16)  # and no GradScaler',
        why="`GradScaler.step` reads whether a gradient overflowed, each step. bfloat16 needs no scaler; "
        "with float16 an optimizer made with `fused=True` looks at the flag on the device",
        places=(
            ("torch/amp/grad_scaler.py", "_maybe_opt_step"),
            ("torch/amp/grad_scaler.py", "step"),
        ),
        calls=("GradScaler",),
    ),
    Advice(
        name="loss-scale",
        line="steps += 1  # count the steps yourself, and ask for the scale where you print it",
        why="`get_scale()` reads the scale from the device each time; whether a step was skipped is known "
        "once every some hundred steps soon enough",
        places=(("torch/amp/grad_scaler.py", "get_scale"), ("accelerate/optimizer.py", "step")),
        calls=("get_scale",),
    ),
    Advice(
        name="unscaled-loss-scale",
        line="if grad_scaler is not None: scale = grad_scaler.scale",
        why="the scale is read although nothing is scaled: in bf16 leave the grad scaler out",
        places=(("megatron/core/optimizer/optimizer.py", "get_loss_scale"),),
    ),
    Advice(
        name="optimizer-state",
        line="torch.optim.AdamW(parameters, fused=True)",
        why="the optimizer reads its step count from the device, once for each parameter: `fused=True` or "
        '`capturable=True` leaves it there; after a checkpoint keep `state["step"]` on the CPU',
        places=tuple(
            (f"torch/optim/{name}.py", "")
            for name in (
                "optimizer",
                "adam",
                "adamw",
                "nadam",
                "radam",
                "adamax",
                "asgd",
                "rprop",
                "adagrad",
            )
        ),
    ),
    Advice(
        name="lightning-progress-bar",
        line="self.log(name, value, prog_bar=False); Trainer(enable_progress_bar=False)",
        why="values for the progress bar are read each step, also where the bar is off",
        places=(
            ("connectors/logger_connector/result.py", "metrics"),
            ("callbacks/progress/progress_bar.py", "get_metrics"),
            ("callbacks/progress/tqdm_progress.py", "_update_progress_bar"),
        ),
    ),
    Advice(
        name="lightning-logged-device",
        line="self.log(name, value.detach())  # a tensor of the device, not a number or a tensor of the host",
        why="a logged value is moved to the device of the module: a number of the host is uploaded each time",
        places=(
            ("connectors/logger_connector/result.py", "update_metrics"),
            ("connectors/logger_connector/result.py", "log"),
            ("core/module.py", "__to_tensor"),
        ),
    ),
    Advice(
        name="distribution-validation",
        line="torch.distributions.Distribution.set_default_validate_args(False)",
        why="each distribution checks its arguments and values, and reads whether they are valid",
        places=(("torch/distributions/", ""),),
        of="torch.distributions",
        calls=(
            "Categorical",
            "Normal",
            "Bernoulli",
            "Beta",
            "Dirichlet",
            "MultivariateNormal",
            "Gamma",
        ),
    ),
    Advice(
        name="clip-grad",
        line="torch.nn.utils.clip_grad_norm_(parameters, max_norm, error_if_nonfinite=False)",
        why="with `error_if_nonfinite=True` the norm is read before each step",
        places=(("torch/nn/utils/clip_grad.py", ""),),
    ),
    Advice(
        name="ultralytics-profile",
        line="model.predict(source, verbose=False)  # time with torch.cuda.Event(enable_timing=True)",
        why="each stage is timed with `torch.cuda.synchronize()`; events measure without waiting",
        places=(
            ("ultralytics/utils/ops.py", "time"),
            ("ultralytics/utils/torch_utils.py", "time_sync"),
        ),
        calls=("time_sync",),
    ),
    Advice(
        name="apex-adam",
        line="apex.optimizers.FusedAdam(parameters, capturable=True)",
        why="it reads its step and whether a gradient overflowed on the host",
        places=(("apex/optimizers/fused_adam.py", ""), ("apex/contrib/optimizers/", "")),
        calls=("FusedAdam",),
    ),
    Advice(
        name="xla-adam",
        line="from torch_xla.amp.syncfree import AdamW",
        why="the optimizers of torch read `found_inf` on the host; the sync-free ones do not",
        places=(("torch_xla/amp/grad_scaler.py", ""),),
        of="torch_xla",
        calls=("GradScaler",),
    ),
    Advice(
        name="trainer-nan-filter",
        line="TrainingArguments(..., logging_nan_inf_filter=False, logging_steps=50)",
        why="with the filter on, the loss of each step is looked at before it is added up",
        places=(
            ("transformers/trainer.py", "training_step"),
            ("transformers/trainer.py", "_inner_training_loop"),
        ),
        of="transformers",
        calls=("TrainingArguments",),
    ),
)


def advice_for(path: str, function: str) -> Advice | None:
    """The advice for a wait in a library's file and function, by the end of the path, if there is any."""
    place = path.replace("\\", "/")
    for one in ADVICE:
        for part, name in one.places:
            inside = (
                f"/{part}" in f"/{place}"
                if part.endswith("/")
                else f"/{place}".endswith(f"/{part}")
            )
            if inside and name in ("", function):
                return one
    return None


def advice_in(source: Source) -> list[Advised]:
    """The advice for calls in the user's own source, by line; what its keywords already say is left out."""
    calls = (node for node in source.nodes if isinstance(node, ast.Call))
    return sorted(
        (one for call in calls for one in _advised(source, call)), key=lambda one: one.line
    )


def advice_at(source: Source, line: int) -> Advice | None:
    """The advice for a line of user code: for a call there, or for what it was called to make.

    `scaler.step(optimizer)` has that of the `GradScaler(...)` which `scaler` was given.
    """
    for found in advice_in(source):
        if found.line == line or _makes_what_is_used(source, found.line, line):
            return found.advice
    return None


def _makes_what_is_used(source: Source, made: int, line: int) -> bool:
    names = {
        target.id
        for node in source.nodes
        if isinstance(node, ast.Assign) and node.lineno == made
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    return any(
        isinstance(node, ast.Attribute)
        and node.lineno == line
        and isinstance(node.value, ast.Name)
        and node.value.id in names
        for node in source.nodes
    )


def _advised(source: Source, node: ast.Call) -> Iterator[Advised]:
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    dotted = source.dotted(node.func) or ""
    for one in ADVICE:
        if name in one.calls and dotted.startswith(one.of) and not _is_said(node, one):
            yield Advised(node.lineno, one)


_SAID = {
    "grad-scaler": ("enabled", False),
    "distribution-validation": ("validate_args", False),
    "apex-adam": ("capturable", True),
    "trainer-nan-filter": ("logging_nan_inf_filter", False),
}


def _is_said(call: ast.Call, advice: Advice) -> bool:
    """Whether the call has the keyword already that the advice is about."""
    word, value = _SAID.get(advice.name, ("", None))
    return any(
        one.arg == word and isinstance(one.value, ast.Constant) and one.value.value is value
        for one in call.keywords
    )
