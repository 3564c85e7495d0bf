"""Keys and values in constant memory against everything kept and masked."""

from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import draws
from torchtrim.errors import Unsupported, UsageError
from torchtrim.stream.kv import CallMasks, SinkWindow, sink_cache, window_mask

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
    with pytest.raises(UsageError, match="does not support gradients"):
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


class Cache:
    def __init__(self, sinks: int, window: int) -> None:
        self.layers = [SinkWindow(sinks, window)]


class Attends(torch.nn.Module):
    """One head of attention over a sink cache, with the masks that it is given or plainly causal."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(13, 8)

    def forward(self, input_ids: Any, past_key_values: Any, attention_mask: Any = None) -> Any:
        states = self.table(input_ids)[:, None]
        rows, _ = past_key_values.layers[0].get_mask_sizes(input_ids.shape[1])
        keys, values = past_key_values.layers[0].update(states, states * 2)
        if attention_mask is None:
            own = torch.arange(input_ids.shape[1])[:, None] + rows - input_ids.shape[1]
            attention_mask = additive(torch.arange(rows)[None] <= own)
        scores = states @ keys.transpose(-1, -2) + attention_mask
        return scores.softmax(-1) @ values


@torch.no_grad()
@pytest.mark.parametrize("chunks", [(20,), (9, 11), (3, 1, 16), (6, 6, 6, 1, 1), (40, 1, 1)])
def test_calls_get_the_mask_that_they_need(chunks: tuple[int, ...]) -> None:
    model, ids = Attends().double(), torch.randint(0, 13, (2, sum(chunks)))
    alone, together = Cache(2, 6), Cache(2, 6)
    CallMasks(together).watch(model, together)
    want = torch.cat([model(one, past_key_values=alone) for one in ids.split(1, dim=1)], dim=2)
    given = torch.ones(2, sum(chunks), dtype=torch.long)
    got = [
        model(one, past_key_values=together, attention_mask=given)
        for one in ids.split(chunks, dim=1)
    ]
    assert float((torch.cat(got, dim=2) - want).abs().max()) <= 1e-12


def test_a_padded_batch_is_refused_and_nothing_is_computed() -> None:
    model, cache = Attends(), Cache(2, 6)
    CallMasks(cache).watch(model, cache)
    mask = torch.tensor([[0, 1, 1], [1, 1, 1]])
    with pytest.raises(UsageError, match="the batch is padded"):
        model(torch.zeros(2, 3, dtype=torch.long), past_key_values=cache, attention_mask=mask)
    assert cache.layers[0].tokens == 0


def test_what_nobody_vouches_for_is_refused_in_batches() -> None:
    layer = SinkWindow(2, 6)
    layer.vouched = False
    layer.update(torch.zeros(1, 1, 2, 3), torch.zeros(1, 1, 2, 3))
    with pytest.raises(UsageError, match=r"sink_cache\(model\)"):
        layer.update(torch.zeros(2, 1, 2, 3), torch.zeros(2, 1, 2, 3))


def test_flash_attention_takes_no_mask() -> None:
    model, cache = Attends(), Cache(2, 6)
    model.config = SimpleNamespace(_attn_implementation="flash_attention_2")
    CallMasks(cache).watch(model, cache)
    with torch.no_grad():
        model(torch.zeros(1, 7, dtype=torch.long), past_key_values=cache)
        with pytest.raises(Unsupported, match="attn_implementation"):
            model(torch.zeros(1, 7, dtype=torch.long), past_key_values=cache)


def test_the_hook_goes_with_the_cache_and_leaves_other_calls_alone() -> None:
    model, cache, other = Attends(), Cache(2, 6), Cache(2, 6)
    CallMasks(cache).watch(model, cache)
    copied = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    own = torch.zeros(1, 1, 9, 9)
    with torch.no_grad():
        for one in (model, copied):
            one(torch.zeros(1, 9, dtype=torch.long), past_key_values=other, attention_mask=None)
            other.layers[0].reset()
        model(torch.zeros(1, 9, dtype=torch.long), past_key_values=cache, attention_mask=own)
    assert len(model._forward_pre_hooks) == 1
    del cache
    assert not model._forward_pre_hooks


@pytest.mark.parametrize("family", FAMILIES)
def test_generate_gives_what_a_token_at_a_time_gives(family: str) -> None:
    model, ids = language_model(family), tokens(70)
    cache = sink_cache(model, sinks=SINKS, window=WINDOW)
    out = model.generate(ids, past_key_values=cache, max_new_tokens=20, do_sample=False)
    alone = sink_cache(model, sinks=SINKS, window=WINDOW)
    with torch.no_grad():
        for one in out[:, :-1].split(1, dim=1):
            last = model(one, past_key_values=alone).logits
    assert int(last[0, -1].argmax()) == int(out[0, -1])
    padded = torch.ones_like(ids)
    padded[0, :3] = 0
    fresh = sink_cache(model, sinks=SINKS, window=WINDOW)
    with pytest.raises(UsageError, match="padded"):
        model.generate(ids, attention_mask=padded, past_key_values=fresh, max_new_tokens=2)
