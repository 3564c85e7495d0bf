"""Modules that treat each row by itself: found, priced, run in parts."""
