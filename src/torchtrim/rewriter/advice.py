"""Host-device syncs inside libraries, and the line of configuration that ends each.

The line belongs in the user's program or in the library's settings. The source is not edited: only its author
knows what the setting means to the program.
"""

from __future__ import annotations

import ast
from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

from torchtrim.source.nodes import called, constant_of, keywords_of, name_set
from torchtrim.source.source import SourceFile


@dataclass(frozen=True, kw_only=True)
class SettingAdvice:
    """A line of configuration to write instead.

    `places` are functions of the library that synchronizes, `path/suffix.py:name`; without a name, all of a
    file. `calls` are the names called by the user's own source, in module `of` if given.
    """

    name: str
    line: str
    why: str
    places: tuple[str, ...] = ()
    calls: Collection[str] = ()
    of: str = ""


class Advised(NamedTuple):
    """Advice for a line of user code."""

    line: int
    advice: SettingAdvice


ADVICE = (
    SettingAdvice(
        name="grad-scaler",
        line='torch.autocast("cuda", dtype=torch.bfloat16)  # and no GradScaler',
        why="`GradScaler.step` reads in each step whether a gradient overflowed. bfloat16 needs no scaler; "
        "with float16 an optimizer with `fused=True` checks the flag on the device",
        places=(
            "torch/amp/grad_scaler.py:_maybe_opt_step",
            "torch/amp/grad_scaler.py:step",
        ),
        calls=("GradScaler",),
    ),
    SettingAdvice(
        name="loss-scale",
        line="steps += 1  # count the steps yourself, and read the scale where you print it",
        why="`get_scale()` reads the scale from the device each time; it is enough to check for skipped "
        "steps every few hundred steps",
        places=("torch/amp/grad_scaler.py:get_scale", "accelerate/optimizer.py:step"),
        calls=("get_scale",),
    ),
    SettingAdvice(
        name="unscaled-loss-scale",
        line="if grad_scaler is not None: scale = grad_scaler.scale",
        why="the scale is read even if no loss is scaled: bf16 needs no grad scaler",
        places=("megatron/core/optimizer/optimizer.py:get_loss_scale",),
    ),
    SettingAdvice(
        name="optimizer-state",
        line="torch.optim.AdamW(parameters, fused=True)",
        why="the optimizer reads its step count from the device once per parameter: `fused=True` or "
        '`capturable=True` leaves it there; after a checkpoint keep `state["step"]` on the CPU',
        places=tuple(
            f"torch/optim/{name}.py:"
            for name in name_set("optimizer adam adamw nadam radam adamax asgd rprop adagrad")
        ),
    ),
    SettingAdvice(
        name="lightning-progress-bar",
        line="self.log(name, value, prog_bar=False); Trainer(enable_progress_bar=False)",
        why="values for the progress bar are read in each step, even if the bar is off",
        places=(
            "connectors/logger_connector/result.py:metrics",
            "callbacks/progress/progress_bar.py:get_metrics",
            "callbacks/progress/tqdm_progress.py:_update_progress_bar",
        ),
    ),
    SettingAdvice(
        name="lightning-logged-device",
        line="self.log(name, value.detach())  # a tensor on the device, not a number or a CPU tensor",
        why="logged values are moved to the module's device: a number is uploaded each time",
        places=(
            "connectors/logger_connector/result.py:update_metrics",
            "connectors/logger_connector/result.py:log",
            "core/module.py:__to_tensor",
        ),
    ),
    SettingAdvice(
        name="distribution-validation",
        line="torch.distributions.Distribution.set_default_validate_args(False)",
        why="each distribution validates its arguments and values, and reads the result",
        places=("torch/distributions/:",),
        of="torch.distributions",
        calls=name_set("Categorical Normal Bernoulli Beta Dirichlet MultivariateNormal Gamma"),
    ),
    SettingAdvice(
        name="clip-grad",
        line="torch.nn.utils.clip_grad_norm_(parameters, max_norm, error_if_nonfinite=False)",
        why="with `error_if_nonfinite=True` the norm is read before each step",
        places=("torch/nn/utils/clip_grad.py:",),
    ),
    SettingAdvice(
        name="ultralytics-profile",
        line="model.predict(source, verbose=False)  # time with torch.cuda.Event(enable_timing=True)",
        why="each stage is timed with `torch.cuda.synchronize()`; events measure without waiting",
        places=(
            "ultralytics/utils/ops.py:time",
            "ultralytics/utils/torch_utils.py:time_sync",
        ),
        calls=("time_sync",),
    ),
    SettingAdvice(
        name="apex-adam",
        line="apex.optimizers.FusedAdam(parameters, capturable=True)",
        why="the host reads its step count and whether a gradient overflowed",
        places=("apex/optimizers/fused_adam.py:", "apex/contrib/optimizers/:"),
        calls=("FusedAdam",),
    ),
    SettingAdvice(
        name="xla-adam",
        line="from torch_xla.amp.syncfree import AdamW",
        why="torch's optimizers read `found_inf` on the host; the sync-free ones do not",
        places=("torch_xla/amp/grad_scaler.py:",),
        of="torch_xla",
        calls=("GradScaler",),
    ),
    SettingAdvice(
        name="trainer-nan-filter",
        line="TrainingArguments(..., logging_nan_inf_filter=False, logging_steps=50)",
        why="with the filter on, each step's loss is checked before it is added up",
        places=(
            "transformers/trainer.py:training_step",
            "transformers/trainer.py:_inner_training_loop",
        ),
        of="transformers",
        calls=("TrainingArguments",),
    ),
)


def advice_for(path: str, function: str) -> SettingAdvice | None:
    """Return the advice for a sync in a library's file and function, or None. Paths match by suffix."""
    place = path.replace("\\", "/")
    for one in ADVICE:
        for part, name in (found.split(":") for found in one.places):
            folder = part.endswith("/")
            inside = f"/{part}" in f"/{place}" if folder else f"/{place}".endswith(f"/{part}")
            if inside and name in ("", function):
                return one
    return None


def advice_in(source: SourceFile) -> list[Advised]:
    """Return the advice for calls in the user's own source, by line, unless their keywords follow it."""
    advised = (
        Advised(call.lineno, advice)
        for call in source.each(ast.Call)
        for advice in ADVICE
        if called(call.func) in advice.calls
        and (source.dotted(call.func) or "").startswith(advice.of)
        and not _is_followed(call, advice)
    )
    return sorted(advised, key=lambda one: one.line)


def advice_at(source: SourceFile, line: int) -> SettingAdvice | None:
    """Return the advice for a line of user code: for a call, or the constructor of an object used there.

    `scaler.step(optimizer)` gets the advice for `scaler = GradScaler(...)`.
    """
    owners = {
        node.value.id
        for node in source.each(ast.Attribute)
        if node.lineno == line and isinstance(node.value, ast.Name)
    }
    lines = {line} | {
        node.lineno
        for node in source.each(ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name) and target.id in owners
    }
    return next((one.advice for one in advice_in(source) if one.line in lines), None)


_FOLLOWED = {
    "grad-scaler": ("enabled", False),
    "distribution-validation": ("validate_args", False),
    "apex-adam": ("capturable", True),
    "trainer-nan-filter": ("logging_nan_inf_filter", False),
}


def _is_followed(call: ast.Call, advice: SettingAdvice) -> bool:
    word, value = _FOLLOWED.get(advice.name, ("", None))
    return word != "" and constant_of(keywords_of(call).get(word)) is value
