"""Benchmarks, one a file. What a part raises by mistake is to be seen there, not survived."""

import os

os.environ.setdefault("TORCHTRIM_DEBUG", "1")
