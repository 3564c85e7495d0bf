"""A key-value cache of constant size for endless generation: attention sinks and a sliding window.

After Xiao et al., "Efficient Streaming Language Models with Attention Sinks" (2023), except that keys keep
the rotation of their true position, so evicting rows does not change the others. A layer is a transformers
cache layer (`CacheLayerMixin`); only `sink_cache` needs transformers.
"""

from __future__ import annotations

import functools
import importlib
import types
import weakref
from typing import Any

import torch
from torch import nn

from torchtrim.errors import Unsupported, UsageError


class CallMasks:
    """A forward pre-hook that passes the right attention mask to each call of a model with this cache.

    Each token of a chunk sees the same rows as if it came alone. Padded batches are rejected.
    """

    def __init__(self, cache: Any = None) -> None:
        self._cache: weakref.ref[Any] | None = None if cache is None else weakref.ref(cache)

    def __reduce__(self) -> Any:
        return CallMasks, ()

    def watch(self, model: nn.Module, cache: Any) -> None:
        """Hook this model's calls until the cache is deleted."""
        handle = model.register_forward_pre_hook(self, with_kwargs=True)
        weakref.finalize(cache, handle.remove)

    def __call__(self, model: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Return the arguments with the call's mask added, or `None` for calls without this cache."""
        cache: Any = None if self._cache is None else self._cache()
        if kwargs.get("past_key_values") is not cache or cache is None:
            return None
        mask = kwargs.get("attention_mask")
        if isinstance(mask, torch.Tensor) and mask.dim() > 2:
            return None
        layer = cache.layers[0]
        tokens = args[0] if args else kwargs.get("input_ids")
        queries = int((kwargs["inputs_embeds"] if tokens is None else tokens).shape[1])
        _refuse_padding(mask, first=not layer.tokens, queries=queries)
        fits = queries == 1 or layer.tokens + queries <= layer.sinks + layer.window
        for one in cache.layers:
            one.vouched = True
        return args, kwargs | {"attention_mask": None if fits else _mask(model, layer, queries)}


def _refuse_padding(mask: Any, *, first: bool, queries: int) -> None:
    """Reject padding. The mask of a single new token is not read, so decoding needs no sync."""
    if isinstance(mask, torch.Tensor) and (first or queries > 1) and not bool(mask.all()):
        raise UsageError(
            "the batch is padded, and a sink cache keeps the same rows for all sequences of a batch: the "
            "sinks of a padded sequence would be its padding. Nothing was computed. Run each sequence in "
            "its own batch, or batch sequences of equal length."
        )


def _mask(model: Any, layer: Any, queries: int) -> Any:
    implementation = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if isinstance(implementation, str) and "flash" in implementation:
        raise Unsupported(
            f"{layer.tokens + queries} tokens do not fit into {layer.sinks} sinks and a window of "
            f"{layer.window}, and {implementation} does not support the mask this needs. Pass the prompt in "
            "chunks that fit and then one token at a time, or load the model with "
            'attn_implementation="sdpa".'
        )
    where = next(model.parameters())
    return layer.mask(queries, where.dtype, where.device)


class SinkWindow:
    """Keys and values of one layer, for the first `sinks` tokens and the newest `window`.

    Rows are stored in two tensors of fixed size and address, `[batch, heads, sinks + window, width]`: the
    sinks, then a ring buffer. A token sees itself, the `window - 1` tokens before it and the sinks. Tokens
    of one chunk see each other causally, and the past as the first of them sees it; `window_mask` makes
    this equal to feeding them one by one. `get_seq_length()` counts all tokens seen so far, which is the
    true position of the next, not the number of rows kept.
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
        """Bytes of keys and values, constant from the first token on."""
        if self.keys is None or self.values is None:
            return 0
        return self.keys.nbytes + self.values.nbytes

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate the rows for states of shape `[batch, heads, tokens, width]`."""
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
        """Append tokens, `[batch, heads, tokens, width]`, and return the keys and values to attend to.

        A single token gets the stored rows without a copy. Raises `UsageError` if gradients are required.
        """
        if key_states.requires_grad or value_states.requires_grad:
            raise UsageError(
                "a sink cache is written in place and does not support gradients; run the model under "
                "torch.no_grad() or torch.inference_mode()."
            )
        if not self.vouched and len(key_states) > 1:
            raise UsageError(
                "this cache was created from a config, so it cannot detect padding, and a padded batch "
                "would get wrong results. Create it from the model: sink_cache(model)."
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
        past = self._at(self.positions(0))
        seen = tuple(
            torch.cat([rows[..., past, :], new], dim=-2)
            for rows, new in ((self.keys, key_states), (self.values, value_states))
        )
        self._write(key_states, value_states, count)
        return seen[0], seen[1]

    def positions(self, queries: int) -> torch.Tensor:
        """Return the true positions of the rows that `queries` new tokens get, `[rows]`, on the host."""
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
        """Return the number of tokens seen so far, which is the true position of the next."""
        return self.tokens

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of rows that the new tokens get and the offset of the first row."""
        past = min(self.tokens, self.sinks + self.window - 1)
        return past + query_length, self.tokens - past

    def get_max_length(self) -> int:
        """Return -1, since the length is unlimited."""
        return -1

    def reset(self) -> None:
        """Forget all tokens, but keep the memory."""
        self.tokens = 0

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the newest `-tokens_to_remove` tokens. Raises `Unsupported` once rows were evicted."""
        if self.tokens > self.sinks + self.window:
            raise Unsupported(
                f"the cache has seen {self.tokens} tokens and keeps {self.sinks + self.window} rows: rows "
                "needed after removing tokens are evicted. Nothing was changed. Reset, or choose a window "
                "that holds all tokens that may be removed."
            )
        self.tokens -= min(abs(tokens_to_remove), self.tokens)

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
    """Return the mask that makes a chunk of tokens equal to single tokens: `[1, 1, queries, rows]`.

    Boolean (true where a token sees a row), or additive if `dtype` is given: 0 or the lowest value. For a
    cache created from a config, or a single layer, pass the mask as `attention_mask` along with the cache.
    A cache created from the model adds it by itself.
    """
    layer: SinkWindow = cache.layers[0] if hasattr(cache, "layers") else cache
    return layer.mask(queries, dtype, device)


def sink_cache(model: Any, *, sinks: int = 4, window: int = 1024) -> Any:
    """Return a transformers `Cache` of `SinkWindow` layers for a model, to pass as `past_key_values`.

    A forward pre-hook, on the model while the cache lives, adds the mask each call needs, so prompts of any
    length work with `generate()`. A padded batch raises `UsageError`: all sequences must have one length.
    If created from a config instead of the model, the caller passes masks (`window_mask`) and only batches
    of one sequence are accepted. Dynamic rotary scaling works as with an unbounded cache, since position
    ids are true positions; it is state of the model, not of the cache. Needs transformers 5 (tested with
    5.23). Raises `Unsupported` without it and for models whose layers do not all have full attention, and
    `UsageError` for a window below 1.
    """
    if window < 1 or sinks < 0:
        raise UsageError(
            f"sinks={sinks}, window={window}: a token sees at least itself, so pass a window of 1 or more "
            "and at least 0 sinks."
        )
    config: Any = model.config if isinstance(model, nn.Module) else model
    text = config.get_text_config(decoder=True)
    others = set(getattr(text, "layer_types", None) or []) - {"full_attention"}
    if others:
        raise Unsupported(
            f"this model has {', '.join(sorted(others))} layers, which bound or mask their own state; a sink "
            "cache needs a model whose layers all have full attention."
        )
    layer_class, cache_class = _transformers_classes()
    cache = cache_class(layers=[layer_class(sinks, window) for _ in range(text.num_hidden_layers)])
    for layer in cache.layers:
        layer.vouched = False
    if isinstance(model, nn.Module):
        CallMasks(cache).watch(model, cache)
    return cache


@functools.cache
def _transformers_classes() -> tuple[Any, Any]:
    try:
        utils = importlib.import_module("transformers.cache_utils")
        bases = (SinkWindow, utils.CacheLayerMixin)
        return types.new_class("SinkWindowLayer", bases), utils.Cache
    except (ImportError, AttributeError) as error:
        raise Unsupported(
            f"a sink cache needs transformers 5 and its CacheLayerMixin: {error}. Install it with "
            "pip install 'transformers>=5', or use SinkWindow on its own."
        ) from error
