"""Split time: recurrent layers run a few time steps at a time."""

from torchtrim.techniques.split_time.technique import TECHNIQUE

__all__ = ["TECHNIQUE"]
