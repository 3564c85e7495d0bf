"""Whether a planned script, or another one, computes the same."""
