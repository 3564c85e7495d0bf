"""The trainer of transformers, and trl's, which extend it: how its step is watched and repeated."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any

from torchtrim.integrations.refusals import SEVERAL

if TYPE_CHECKING:
    from torchtrim.api import InTraining, Trainer


def trainer_of(callback: object) -> Any:
    """Return the trainer that is calling this callback, which it does not pass: the caller's `self`."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        handler = getattr(owner, "__dict__", {}).get("callback_handler")
        if any(one is callback for one in getattr(handler, "callbacks", ())):
            return owner
        frame = frame.f_back
    return None


def refusal(trainer: Any) -> str:
    """Return the reason why a trainer cannot be planned, or an empty string."""
    args = trainer.args
    if args.world_size > 1 or args.n_gpu > 1:
        return SEVERAL
    for name in ("is_deepspeed_enabled", "is_fsdp_enabled"):
        if getattr(trainer, name, False):
            return f"the trainer has {name}, and its own way to save memory."
    if getattr(args, "torch_compile", False):
        return "torch_compile=True: a plan is for a model that runs eagerly."
    if getattr(trainer.accelerator, "scaler", None) is not None:
        return "fp16=True scales the loss, which a repeated step cannot: use bf16=True."
    return ""


def watch(trainer: Any, fitting: InTraining) -> Callable[[], None]:
    """Note the arguments of each `training_step`; return a function that undoes it."""
    own = vars(trainer)
    original, had = trainer.training_step, own.get("training_step")

    def training_step(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        fitting.micro_batch(copy.copy(inputs), args, kwargs)
        return original(model, inputs, *args, **kwargs)

    def undo() -> None:
        if own.get("training_step") is training_step:
            own.pop("training_step")
            own.update({} if had is None else {"training_step": had})

    own["training_step"] = training_step
    return undo


def described(trainer: Any) -> Trainer:
    """Return what repeats a step of the trainer."""
    from torchtrim.api import Trainer

    model, optimizer, most = trainer.model, trainer.optimizer, trainer.args.max_grad_norm

    def micro_batch(_: int, inputs: Any, args: Any, kwargs: Any) -> None:
        trainer.training_step(model, copy.copy(inputs), *args, **kwargs)

    def update() -> None:
        if most is not None and most > 0:
            trainer.accelerator.clip_grad_norm_(model.parameters(), most)
        raw.step()
        model.zero_grad()

    raw = getattr(optimizer, "optimizer", optimizer)
    return Trainer(model, raw, micro_batch, update, (trainer, trainer.state))
