"""Keys and values of endless tokens in constant memory: attention sinks and a sliding window.

After Xiao et al., "Efficient Streaming Language Models with Attention Sinks" (2023), except that keys keep
the rotation of their true position, so a row means the same however many rows went. A layer is a cache
layer of transformers (`CacheLayerMixin`); only `sink_cache` needs transformers.
"""

from __future__ import annotations

import functools
import importlib
import types
from typing import Any

import torch
from torch import nn

from torchtrim.errors import Unsupported, UsageError
from torchtrim.stream.masks import CallMasks


class SinkWindow:
    """Keys and values of one layer: of the first `sinks` tokens and of the newest `window`.

    Rows lie in two tensors of fixed size and address, `[batch, heads, sinks + window, width]`: the first
    tokens, then a ring. A token sees itself, the `window - 1` before it and the sinks. Tokens given
    together see each other causally, and before them what the first of them sees; `window_mask` makes
    that the same as token by token. `get_seq_length()` counts all tokens ever given, the true position of
    the next, and has nothing to do with how many rows are kept.
    """

    is_sliding = False
    is_compileable = False
    is_croppable = False
    supports_early_init = False
    _layer_type = None

    def __init__(self, sinks: int, window: int) -> None:
        self.sinks, self.window = sinks, window
        self.keys: torch.Tensor | None = None
        self.values: torch.Tensor | None = None
        self.is_initialized = False
        self.vouched = True
        self.tokens = 0

    @property
    def bytes(self) -> int:
        """Bytes of keys and values: the same from the first token on."""
        if self.keys is None or self.values is None:
            return 0
        return self.keys.nbytes + self.values.nbytes

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Make room for the rows, as these are shaped: `[batch, heads, tokens, width]`."""
        self.dtype, self.device = key_states.dtype, key_states.device
        rows = self.sinks + self.window
        self.keys, self.values = (
            torch.zeros((*one.shape[:2], rows, one.shape[-1]), dtype=one.dtype, device=one.device)
            for one in (key_states, value_states)
        )
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take new tokens, `[batch, heads, tokens, width]`; returns what they may attend to.

        One token gets the rows as they lie, without a copy. Raises `UsageError` with gradients.
        """
        if key_states.requires_grad or value_states.requires_grad:
            raise UsageError(
                "a sink cache is written in place and carries no gradients; run the model under "
                "torch.no_grad() or torch.inference_mode()."
            )
        if not self.vouched and len(key_states) > 1:
            raise UsageError(
                "this cache was made from a config, so it cannot see whether the batch is padded, and a "
                "padded one would get wrong results. Make it from the model: sink_cache(model)."
            )
        if self.keys is None or self.values is None:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        count = key_states.shape[-2]
        if count == 1:
            place = self._places(self.tokens, self.tokens + 1)
            self.keys[..., place, :] = key_states
            self.values[..., place, :] = value_states
            self.tokens += 1
            rows = min(self.tokens, self.sinks + self.window)
            return self.keys[..., :rows, :], self.values[..., :rows, :]
        past = self._past()
        seen = tuple(
            torch.cat([kept[..., past, :], new], dim=-2)
            for kept, new in ((self.keys, key_states), (self.values, value_states))
        )
        self._write(key_states, value_states, count)
        return seen[0], seen[1]

    def positions(self, queries: int) -> torch.Tensor:
        """True positions of the rows that `queries` new tokens get, `[rows]`, on the host."""
        sinks = torch.arange(min(self.sinks, self.tokens))
        first = min(max(self.sinks, self.tokens - self.window + 1), self.tokens)
        return torch.cat([sinks, torch.arange(first, self.tokens + queries)])

    def mask(
        self, queries: int, dtype: torch.dtype | None, device: torch.device | str
    ) -> torch.Tensor:
        """See `window_mask`."""
        rows = self.positions(queries)[None, :]
        own = torch.arange(self.tokens, self.tokens + queries)[:, None]
        sees = (rows <= own) & ((rows < self.sinks) | (rows > own - self.window))
        sees = sees[None, None].to(device)
        if dtype is None:
            return sees
        return torch.zeros(sees.shape, dtype=dtype, device=device).masked_fill(
            ~sees, torch.finfo(dtype).min
        )

    def get_seq_length(self) -> int:
        """Tokens given so far: the true position of the next one."""
        return self.tokens

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Rows that so many new tokens get, and the position that the first would have if none had gone."""
        kept = min(self.tokens, self.sinks + self.window - 1)
        return kept + query_length, self.tokens - kept

    def get_max_length(self) -> int:
        """-1: there is no longest sequence."""
        return -1

    def reset(self) -> None:
        """Forget all tokens; the memory stays."""
        self.tokens = 0

    def crop(self, tokens_to_remove: int) -> None:
        """Take the newest `-tokens_to_remove` tokens back. Raises `Unsupported` once rows went."""
        if self.tokens > self.sinks + self.window:
            raise Unsupported(
                f"{self.tokens} tokens were given and {self.sinks + self.window} rows are kept: the rows "
                "that taking tokens back would uncover are gone. Nothing was changed. Reset, or choose a "
                "window that holds all tokens that may be removed."
            )
        self.tokens -= min(abs(tokens_to_remove), self.tokens)

    def _past(self) -> torch.Tensor:
        return self._at(self.positions(0))

    def _places(self, first: int, end: int) -> torch.Tensor | slice:
        if end - first == 1:
            place = first if first < self.sinks else self.sinks + (first - self.sinks) % self.window
            return slice(place, place + 1)
        return self._at(torch.arange(first, end))

    def _at(self, positions: torch.Tensor) -> torch.Tensor:
        ring = self.sinks + (positions - self.sinks) % self.window
        return torch.where(positions < self.sinks, positions, ring).to(self.device)

    def _write(self, keys: torch.Tensor, values: torch.Tensor, count: int) -> None:
        assert self.keys is not None
        assert self.values is not None
        first, end = self.tokens, self.tokens + count
        spans = [(first, min(end, self.sinks)), (max(first, self.sinks, end - self.window), end)]
        for begin, stop in spans:
            if begin < stop:
                places = self._places(begin, stop)
                self.keys[..., places, :] = keys[..., begin - first : stop - first, :]
                self.values[..., places, :] = values[..., begin - first : stop - first, :]
        self.tokens = end


def window_mask(
    cache: Any, queries: int, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """The mask with which tokens given together see what each would see alone: `[1, 1, queries, rows]`.

    Booleans, true where a token sees a row; with `dtype` the terms added to scores: 0 or the least number.
    For a cache made from a config, or a layer on its own: pass it as `attention_mask`, with the cache. One
    made from the model sees to that itself.
    """
    layer: SinkWindow = cache.layers[0] if hasattr(cache, "layers") else cache
    return layer.mask(queries, dtype, device)


def sink_cache(model: Any, *, sinks: int = 4, window: int = 1024) -> Any:
    """A transformers `Cache` of `SinkWindow` layers for a model: pass it as `past_key_values`.

    Calls of the model with it get the mask that they need, so prompts of any length go through `generate()`.
    For as long as the cache is there a forward pre-hook is on the model. Batches have one length: a padded
    one raises `UsageError`. From a config in place of the model, masks are the caller's (`window_mask`), and
    batches of one sequence alone are taken. Dynamic rotary scaling works as it does for an unbounded cache,
    since position ids count true positions; it is state of the model, not of the cache. Needs transformers
    5 (made with 5.23). Raises `Unsupported` without it, and for models with other than full attention;
    `UsageError` for a window below 1.
    """
    if window < 1 or sinks < 0:
        raise UsageError(
            f"sinks={sinks}, window={window}: a token sees at least itself, so give a window of 1 or more "
            "and no fewer than 0 sinks."
        )
    config: Any = model.config if isinstance(model, nn.Module) else model
    text = config.get_text_config(decoder=True)
    others = set(getattr(text, "layer_types", None) or []) - {"full_attention"}
    if others:
        raise Unsupported(
            f"this model has layers of {', '.join(sorted(others))}, which bound or mask their own state; a "
            "sink cache is for models whose layers all have full attention."
        )
    layer, cache = _made()
    made = cache(layers=[layer(sinks, window) for _ in range(text.num_hidden_layers)])
    for one in made.layers:
        one.vouched = False
    if isinstance(model, nn.Module):
        CallMasks(made).watch(model, made)
    return made


@functools.cache
def _made() -> tuple[Any, Any]:
    try:
        theirs = importlib.import_module("transformers.cache_utils")
        bases = (SinkWindow, theirs.CacheLayerMixin)
        return types.new_class("SinkWindowLayer", bases), theirs.Cache
    except (ImportError, AttributeError) as error:
        raise Unsupported(
            f"a sink cache needs transformers 5 and its CacheLayerMixin: {error}. Install it with "
            "pip install 'transformers>=5', or use SinkWindow on its own."
        ) from error
