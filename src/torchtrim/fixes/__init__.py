"""Fixes of the user's source, one a file, each with what it needs to be sound."""
