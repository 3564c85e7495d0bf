"""Replay: drop single tensors that autograd saved, and run the operators that made them again in backward."""

from torchtrim.techniques.replay.technique import TECHNIQUE

__all__ = ["TECHNIQUE"]
