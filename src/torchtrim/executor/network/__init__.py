"""Runs a captured network by a plan of its memory, for `in_place`, `arena`, `release` and `split_batch`."""
