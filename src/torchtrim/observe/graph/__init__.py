"""Reads a network's graph without running it: `torch.export` on fake tensors."""

from torchtrim.observe.graph.capture import capture as capture
from torchtrim.observe.graph.capture import plain_state as plain_state
from torchtrim.observe.graph.captured import Captured as Captured
