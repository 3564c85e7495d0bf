"""Digests of what a step computed: losses, outputs, gradients, parameters, state, generators."""
