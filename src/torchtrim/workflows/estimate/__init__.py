"""Peaks from dry runs, for one device or spread over many."""
