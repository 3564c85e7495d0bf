"""Attention with relative positions on queries, keys and values, in one operator."""

from torchtrim.attention.adapters import autoformer_attention as autoformer_attention
from torchtrim.attention.adapters import decomposed_attention as decomposed_attention
from torchtrim.attention.adapters import t5_attention as t5_attention
from torchtrim.attention.adapters import window_bias_attention as window_bias_attention
from torchtrim.attention.advice import Advice as Advice
from torchtrim.attention.advice import advise as advise
from torchtrim.attention.buckets import Buckets as Buckets
from torchtrim.attention.buckets import Coefficients as Coefficients
from torchtrim.attention.irpe import METHOD as METHOD
from torchtrim.attention.irpe import build_rpe as build_rpe
from torchtrim.attention.irpe import get_rpe_config as get_rpe_config
from torchtrim.attention.irpe import iRPE as iRPE
from torchtrim.attention.irpe import iRPE_Cross as iRPE_Cross
from torchtrim.attention.module import RelativeAttention as RelativeAttention
from torchtrim.attention.relative import relative_attention as relative_attention
from torchtrim.attention.replace import replacement as replacement
