"""Fixes a script's source round by round, and proves the fixes."""
