"""Reasons against a plan inside a training that several libraries share."""

SEVERAL = (
    "the training uses several devices or processes, and a plan inside a training is for one. Plan the "
    "script instead: torchtrim optimize SCRIPT --memory 60% --processes N."
)


def several_optimizers(count: int) -> str:
    """Return the reason against a training with this many optimizers."""
    return f"the training has {count} optimizers, and a plan inside a training is for one."
