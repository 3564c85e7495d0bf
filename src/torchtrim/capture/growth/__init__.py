"""Detects memory growth from frame to frame of a stream, or from step to step of training."""
