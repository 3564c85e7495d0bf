"""Runs a model in stages on `torch.distributed.pipelining`. It executes; the planner decides."""
