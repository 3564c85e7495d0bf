"""What a model knows of a sink cache's rows: the mask of each call, `generate()` included."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn

from torchtrim.errors import Unsupported, UsageError


class CallMasks:
    """A forward pre-hook that gives each call of a model with this cache the mask that it needs.

    Tokens that are given together see what each would see alone. A padded batch is refused.
    """

    def __init__(self, cache: Any = None) -> None:
        self._cache: weakref.ref[Any] | None = None if cache is None else weakref.ref(cache)

    def __reduce__(self) -> Any:
        return CallMasks, ()

    def watch(self, model: nn.Module, cache: Any) -> None:
        """See to the calls of this model for as long as the cache is there."""
        handle = model.register_forward_pre_hook(self, with_kwargs=True)
        weakref.finalize(cache, handle.remove)

    def _is_ours(self, cache: Any) -> bool:
        return self._cache is not None and self._cache() is cache

    def __call__(self, model: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """The arguments, with the mask that the call needs."""
        cache = kwargs.get("past_key_values")
        if cache is None or not self._is_ours(cache):
            return None
        mask = kwargs.get("attention_mask")
        if isinstance(mask, torch.Tensor) and mask.dim() > 2:
            return None
        layer = cache.layers[0]
        queries = _queries(args, kwargs)
        _refuse_padding(mask, first=not layer.tokens, queries=queries)
        fits = queries == 1 or layer.tokens + queries <= layer.sinks + layer.window
        for one in cache.layers:
            one.vouched = True
        return args, kwargs | {"attention_mask": None if fits else _mask(model, layer, queries)}


def _queries(args: Any, kwargs: dict[str, Any]) -> int:
    given = args[0] if args else kwargs.get("input_ids")
    if given is None:
        given = kwargs["inputs_embeds"]
    return int(given.shape[1])


def _refuse_padding(mask: Any, *, first: bool, queries: int) -> None:
    """Looked at where tokens are given together, so that a token at a time needs no sync."""
    if isinstance(mask, torch.Tensor) and (first or queries > 1) and not bool(mask.all()):
        raise UsageError(
            "the batch is padded, and a sink cache keeps the same rows for all sequences of a batch: the "
            "sinks of a padded one would be its padding. Nothing was computed. Give each sequence a batch "
            "of its own, or batch those of one length."
        )


def _mask(model: Any, layer: Any, queries: int) -> Any:
    implementation = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if isinstance(implementation, str) and "flash" in implementation:
        raise Unsupported(
            f"{layer.tokens + queries} tokens do not fit into {layer.sinks} sinks and a window of "
            f"{layer.window}, and {implementation} takes no mask that hides the others. Give the prompt in "
            "parts that fit and one token at a time beyond that, or load the model with "
            'attn_implementation="sdpa".'
        )
    where = next(model.parameters())
    return layer.mask(queries, where.dtype, where.device)
