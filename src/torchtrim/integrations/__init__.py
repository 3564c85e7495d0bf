"""torchtrim in the trainers of transformers, trl and Lightning, and in loops of accelerate.

    Trainer(model, arguments, callbacks=[TorchtrimCallback(memory="60%")])

These libraries are not imported here.
"""

from torchtrim.integrations.callback import TorchtrimCallback
from torchtrim.integrations.hook import TorchtrimHook

__all__ = ["TorchtrimCallback", "TorchtrimHook"]
