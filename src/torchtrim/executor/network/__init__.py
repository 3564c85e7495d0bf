"""Run a captured network by a memory plan, for `in_place`, `arena`, `release` and `split_batch`."""
