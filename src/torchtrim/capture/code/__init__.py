"""Reads the source of functions that are loaded: what a block writes, whether `step` follows."""
