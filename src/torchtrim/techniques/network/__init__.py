"""Runs a captured network by a plan of its memory: what in_place, arena, release and split_batch share."""
