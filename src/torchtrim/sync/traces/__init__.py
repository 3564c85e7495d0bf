"""A profiler trace -> the calls in which the host waited, whose they are, and the program to replay."""
