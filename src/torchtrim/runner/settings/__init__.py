"""Global settings of a run: eager, in float64, uninitialized memory."""
