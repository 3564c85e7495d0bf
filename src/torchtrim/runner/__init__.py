"""Runs scripts in their own processes, on one or several ranks, and takes each through its steps."""
