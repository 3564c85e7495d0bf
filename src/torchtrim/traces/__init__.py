"""Reads profiler traces: the calls in which the host waited, their sites, and the program to replay."""
