"""Reads profiler traces: the calls that blocked the host, their sites, and a program to replay."""
