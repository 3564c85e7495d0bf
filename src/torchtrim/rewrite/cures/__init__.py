"""The cures: each file has a `CURE`."""
