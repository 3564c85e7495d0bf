"""Ranks of a job on this machine, real or in a fake process group."""
