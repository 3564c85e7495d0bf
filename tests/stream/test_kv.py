"""Keys and values in constant memory against everything kept and masked."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import draws
from torchtrim.errors import Unsupported, UsageError
from torchtrim.stream.kv import SinkWindow, sink_cache, window_mask

FAMILIES = ["Llama", "Qwen2"]
SINKS, WINDOW = 4, 28


def sees(tokens: int, sinks: int, window: int) -> torch.Tensor:
    own, row = torch.arange(tokens)[:, None], torch.arange(tokens)[None, :]
    return (row <= own) & ((row < sinks) | (row > own - window))


@settings(max_examples=draws.count(60), deadline=None)
@given(st.lists(st.integers(1, 9), max_size=20), st.integers(0, 3), st.integers(1, 7))
def test_rows_are_those_that_a_token_sees(chunks: list[int], sinks: int, window: int) -> None:
    layer, given_so_far = SinkWindow(sinks, window), 0
    for chunk in chunks:
        own = torch.arange(given_so_far, given_so_far + chunk, dtype=torch.float32)
        states = own.reshape(1, 1, chunk, 1)
        rows, offset = layer.get_mask_sizes(chunk)
        mask = window_mask(layer, chunk)[0, 0]
        assert offset + rows == given_so_far + chunk
        keys, values = layer.update(states, states * 10)
        given_so_far += chunk
        assert keys.shape[-2] == rows == mask.shape[-1]
        assert torch.equal(values, keys * 10)
        all_seen = sees(given_so_far, sinks, window)
        for query in range(chunk):
            want = all_seen[given_so_far - chunk + query].nonzero().flatten().float()
            got = keys.flatten() if chunk == 1 else keys.flatten()[mask[query]]
            assert torch.equal(got.sort().values, want)
    assert layer.get_seq_length() == given_so_far


def test_memory_is_constant_and_stays_where_it_is() -> None:
    layer = SinkWindow(2, 6)
    assert layer.bytes == 0
    places = set()
    for chunk in (40, 1, 1, 3, 1):
        layer.update(torch.ones(2, 3, chunk, 4), torch.ones(2, 3, chunk, 5))
        assert layer.keys is not None
        places.add((layer.keys.data_ptr(), layer.bytes))
    assert len(places) == 1
    assert layer.bytes == 2 * 3 * 8 * (4 + 5) * 4
    assert (layer.get_seq_length(), layer.get_max_length()) == (46, -1)


def test_taking_tokens_back() -> None:
    layer = SinkWindow(1, 3)
    layer.update(torch.arange(3.0).reshape(1, 1, 3, 1), torch.zeros(1, 1, 3, 1))
    layer.crop(-2)
    keys, _ = layer.update(torch.full((1, 1, 1, 1), 7.0), torch.zeros(1, 1, 1, 1))
    assert keys.flatten().tolist() == [0.0, 7.0]
    layer.update(torch.zeros(1, 1, 5, 1), torch.zeros(1, 1, 5, 1))
    with pytest.raises(Unsupported, match="Nothing was changed"):
        layer.crop(-1)
    layer.reset()
    assert layer.get_seq_length() == 0


def test_gradients_are_refused() -> None:
    with pytest.raises(UsageError, match="no gradients"):
        SinkWindow(1, 2).update(torch.ones(1, 1, 1, 1, requires_grad=True), torch.ones(1, 1, 1, 1))


def language_model(family: str, **options: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.05,
        **options,
    )
    return getattr(transformers, f"{family}ForCausalLM")(config).eval()


def tokens(count: int) -> torch.Tensor:
    return torch.randint(0, 61, (1, count), generator=torch.Generator().manual_seed(1))


def additive(mask: torch.Tensor) -> torch.Tensor:
    return torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)[None, None]


@torch.no_grad()
def bounded(model: Any, ids: torch.Tensor, chunk: int, window: int = WINDOW) -> torch.Tensor:
    cache = sink_cache(model.config, sinks=SINKS, window=window)
    out = []
    for part in ids.split(chunk, dim=1):
        count = part.shape[1]
        mask = window_mask(cache, count, torch.float32) if count > 1 else None
        out.append(model(part, past_key_values=cache, attention_mask=mask).logits)
        assert {layer.keys.shape[-2] for layer in cache.layers} == {SINKS + window}
    return torch.cat(out, dim=1)


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_a_masked_oracle(family: str) -> None:
    model, ids = language_model(family), tokens(120)
    oracle = model(ids, attention_mask=additive(sees(120, SINKS, WINDOW))).logits
    assert float(oracle.std()) > 0.02
    full = model(ids).logits
    assert float((full - oracle).abs().max()) > 1e-4
    for chunk in (1, 7, 50):
        assert float((bounded(model, ids, chunk) - oracle).abs().max()) <= 1e-6
    double = model.double()
    exact = double(ids, attention_mask=additive(sees(120, SINKS, WINDOW)).double()).logits
    got = torch.cat(
        [
            double(one, past_key_values=cache).logits
            for cache in [sink_cache(model.config, sinks=SINKS, window=WINDOW)]
            for one in ids.split(1, dim=1)
        ],
        dim=1,
    )
    assert float((got - exact).abs().max()) <= 1e-12


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_dynamic_rotary_scaling_is_that_of_true_positions(family: str) -> None:
    transformers = pytest.importorskip("transformers")
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    ids, mask = tokens(110), sees(110, SINKS, WINDOW)
    model = language_model(family, max_position_embeddings=48, rope_parameters=rope)
    cache, out = transformers.DynamicCache(config=model.config), []
    for number in range(110):
        seen = additive(mask[number : number + 1, : number + 1])
        part = ids[:, number : number + 1]
        out.append(model(part, past_key_values=cache, attention_mask=seen).logits)
    oracle = torch.cat(out, dim=1)
    fresh = language_model(family, max_position_embeddings=48, rope_parameters=rope)
    assert float((bounded(fresh, ids, 1) - oracle).abs().max()) <= 1e-6
    plain = language_model(family, max_position_embeddings=48)
    assert float((bounded(plain, ids, 1) - oracle).abs().max()) > 1e-4


@torch.no_grad()
def test_a_window_that_holds_everything_changes_nothing() -> None:
    model, ids = language_model("Llama"), tokens(40)
    assert float((bounded(model, ids, 1, 40) - model(ids).logits).abs().max()) <= 1e-6


def test_generate_takes_it() -> None:
    model = language_model("Llama")
    cache = sink_cache(model.config, sinks=SINKS, window=WINDOW)
    out = model.generate(tokens(5), past_key_values=cache, max_new_tokens=60, do_sample=False)
    assert out.shape == (1, 65)
    assert cache.get_seq_length() == 64


def test_what_cannot_be_bounded_is_refused() -> None:
    model = language_model("Llama")
    with pytest.raises(UsageError, match="window of 1 or more"):
        sink_cache(model.config, window=0)
    model.config.layer_types = ["full_attention", "sliding_attention"]
    with pytest.raises(Unsupported, match="sliding_attention"):
        sink_cache(model.config)
