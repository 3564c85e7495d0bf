"""Runs a module in parts of the batch, in forward and again in backward. `micro_batch` is the technique."""
