"""Pipelines: a profile -> a model cut into stages, a schedule and its micro-batches, all simulated."""
