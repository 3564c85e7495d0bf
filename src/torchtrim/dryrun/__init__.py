"""Runs a program dry: every operator's results have their shape, and none is computed or takes memory."""
