"""Lightning's trainer: how its step is repeated."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from torchtrim.integrations.refusals import SEVERAL, several_optimizers

if TYPE_CHECKING:
    from torchtrim.api import Trainer


def refusal(trainer: Any, module: Any) -> str:
    """Return the reason why a training cannot be planned, or an empty string."""
    if trainer.world_size > 1:
        return SEVERAL
    if not module.automatic_optimization:
        return (
            "automatic_optimization is False, so only the module knows its step: see TorchtrimHook."
        )
    if len(trainer.optimizers) != 1:
        return several_optimizers(len(trainer.optimizers))
    if getattr(trainer.precision_plugin, "scaler", None) is not None:
        return (
            "precision='16-mixed' scales the loss, which a repeated step cannot: use 'bf16-mixed'."
        )
    return ""


def described(trainer: Any, module: Any) -> Trainer:
    """Return what repeats a step of the trainer."""
    from torchtrim.api import Trainer

    (optimizer,) = trainer.optimizers
    indexed = "batch_idx" in inspect.signature(module.training_step).parameters

    def micro_batch(position: int, batch: Any, index: int) -> None:
        with trainer.precision_plugin.train_step_context():
            output = _unlogged(module, (batch, index) if indexed else (batch,))
        loss = output["loss"] if isinstance(output, dict) else output
        if position == 0:  # as Lightning does: the last step's gradients live until now
            optimizer.zero_grad()
        module.backward(loss / trainer.accumulate_grad_batches)

    def update() -> None:
        most, how = trainer.gradient_clip_val, trainer.gradient_clip_algorithm
        module.configure_gradient_clipping(
            optimizer, gradient_clip_val=most, gradient_clip_algorithm=how
        )
        optimizer.step()

    return Trainer(module, optimizer, micro_batch, update)


def _unlogged(module: Any, arguments: tuple[Any, ...]) -> Any:
    own = vars(module)
    own["log"] = own["log_dict"] = lambda *_, **__: None
    try:
        return module.training_step(*arguments)
    finally:
        del own["log"], own["log_dict"]
