"""Runs scripts in processes of their own, on one rank or several, and leads each through its steps."""
