"""Attention with relative positions on queries, keys and values, all in one operator."""

from torchtrim.attention.buckets import Buckets as Buckets
from torchtrim.attention.buckets import Coefficients as Coefficients
from torchtrim.attention.relative import relative_attention as relative_attention
