"""Processes of runs: started, forked from a warm one, watched, ended."""
