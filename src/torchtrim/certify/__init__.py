"""Compares an original with its planned run, and gives the verdict."""
