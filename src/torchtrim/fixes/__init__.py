"""Fixes: one, or a family of one shape, per file."""
