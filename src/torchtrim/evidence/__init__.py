"""Digests of a step's results: losses, outputs, gradients, parameters, state, random generators."""
