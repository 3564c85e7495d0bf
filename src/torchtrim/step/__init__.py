"""A training step as tasks and tensors, edits of it, and the simulator of its memory and time."""
