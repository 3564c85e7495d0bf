"""Reads the source of loaded functions: side effects of a block, whether `step` follows backward."""
