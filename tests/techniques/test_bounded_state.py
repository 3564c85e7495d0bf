"""Bounded state as a technique: what it binds, that results are equal, that it is taken back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import torchtrim
from stream import standins
from torchtrim.errors import ApplyFailed
from torchtrim.executor.registry import technique
from torchtrim.records.plan import Plan, Prediction, Technique
from torchtrim.stream.lifetimes import unbounded
from torchtrim.stream.records import Objects

BITWISE: Any = "BITWISE"


def plan(*where: str, equivalence: Any = BITWISE, **options: Any) -> Plan:
    chosen = Technique(name="bounded_state", where=where, options=options, equivalence=equivalence)
    return Plan(
        torchtrim="0",
        script="",
        fingerprint={},
        budget_bytes=0,
        techniques=(chosen,),
        predicted=Prediction(peak_bytes=0, step_seconds=0.0),
    )


def images(count: int = 40) -> torch.Tensor:
    return torch.randn(count, 1, 6, generator=torch.Generator().manual_seed(0))


def tracked(predictor: Any, state: Any, frames: int = 40) -> list[torch.Tensor]:
    return list(predictor.propagate_in_video(state, list(range(frames))))


class Predictor(standins.Predictor):
    """The stand-in, with the package's name for what it does."""

    def propagate_in_video(self, inference_state: Any, order: list[int]) -> Any:
        return self.propagate(inference_state, order)


def predictor_and_state() -> tuple[Any, Any]:
    predictor = Predictor()
    state = predictor.init_state(images())
    predictor.click(state, 0, 1)
    return predictor, state


def kept(state: Any) -> int:
    return len(state["output_dict_per_obj"][1]["non_cond_frame_outputs"])


def test_a_predictors_states_are_bound_when_they_propagate() -> None:
    free = tracked(*predictor_and_state())
    predictor, state = predictor_and_state()
    before = dict(vars(predictor))
    applied = torchtrim.apply(plan("Predictor"), predictor)
    found = tracked(predictor, state)
    assert all(torch.equal(a, b) for a, b in zip(free, found, strict=True))
    assert len({tuple(one.flatten().tolist()) for one in found}) > 20
    assert isinstance(state["output_dict_per_obj"], Objects)
    assert kept(state) < 40
    applied.revert()
    assert vars(predictor).keys() == before.keys()
    assert "propagate_in_video" not in vars(predictor)
    assert type(state["output_dict_per_obj"]) is dict


def test_a_predictor_after_it_was_reverted_is_unbounded() -> None:
    predictor, state = predictor_and_state()
    torchtrim.apply(plan("Predictor"), predictor).revert()
    tracked(predictor, state)
    assert kept(state) == 39


def test_a_broken_policy_is_seen() -> None:
    with unbounded():
        predictor, state = predictor_and_state()
        torchtrim.apply(plan("Predictor"), predictor)
        free = tracked(predictor, state)
        assert kept(state) == 39
    predictor, state = predictor_and_state()
    predictor.num_maskmem, predictor.max_obj_ptrs_in_encoder = 2, 4
    torchtrim.apply(plan("Predictor"), predictor)
    states = tracked(predictor, state)
    assert not all(torch.equal(a, b) for a, b in zip(free, states, strict=True))


def test_sessions_are_bound_when_they_come_by() -> None:
    pytest.importorskip("transformers")
    from stream import tiny

    def masks(model: Any, session: Any, frames: int = 24) -> list[str]:
        tiny.prompt(session, 0)
        return [
            tiny.digest(model(session, frame=tiny.image(frame)).pred_masks)
            for frame in range(frames)
        ]

    model = tiny.tracker()
    free = tiny.session(model)
    expected = masks(model, free)
    hooks = len(model._forward_pre_hooks), len(model._forward_hooks)
    applied = torchtrim.apply(plan("Sam2VideoModel"), model)
    one, other = tiny.session(model), tiny.session(model)
    assert masks(model, one) == masks(model, other) == expected
    assert len(set(expected)) > 12
    assert len(one.processed_frames.keys()) == 0
    assert len(one.output_dict_per_obj[0]["non_cond_frame_outputs"]) == 16
    applied.revert()
    assert (len(model._forward_pre_hooks), len(model._forward_hooks)) == hooks
    assert type(one.output_dict_per_obj) is type(free.output_dict_per_obj)
    assert tiny.digest(model(one, frame=tiny.image(24)).pred_masks) == tiny.digest(
        model(free, frame=tiny.image(24)).pred_masks
    )


def test_a_language_model_gets_a_cache_of_sinks() -> None:
    pytest.importorskip("transformers")
    from stream import test_kv as kv

    family = next(iter(kv.FAMILIES))
    model = kv.language_model(family, max_position_embeddings=512)
    asked = {"sinks": 2, "window": 30, "equivalence": "SEMANTIC"}
    name = type(model).__name__
    applied = torchtrim.apply(plan(name, **asked), model)
    ids = kv.tokens(8)
    with torch.no_grad():
        found = model.generate(
            ids, max_new_tokens=60, do_sample=False, return_dict_in_generate=True
        )
    assert found.past_key_values.layers[0].keys.shape[-2] == 32
    assert found.sequences.shape[-1] == 68
    applied.revert()
    with torch.no_grad():
        after = model.generate(ids, max_new_tokens=20, do_sample=False)
    assert torch.equal(after, found.sequences[:, :28])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"window": 30}, 'equivalence = "SEMANTIC"'),
        ({"keep": 7}, 'equivalence = "SEMANTIC"'),
        ({"windows": 30}, "no option 'windows'"),
        ({"equivalence": "SEMANTIC", "keep": 7}, "not an option for states"),
    ],
)
def test_options_that_cannot_be(options: Any, words: str) -> None:
    predictor = Predictor()
    with pytest.raises(ApplyFailed, match=words):
        torchtrim.apply(plan("Predictor", **options), predictor)
    assert "propagate_in_video" not in vars(predictor)


def test_models_that_no_adapter_knows() -> None:
    with pytest.raises(ApplyFailed, match="bound_caches"):
        torchtrim.apply(plan("Linear"), nn.Linear(2, 2))
    with pytest.raises(ApplyFailed, match="there is no such module"):
        torchtrim.apply(plan("Linear.tracker"), nn.Linear(2, 2))


def test_it_offers_nothing_for_a_budget() -> None:
    assert technique("bounded_state").options(None) == ()  # type: ignore[arg-type]
    assert technique("bounded_state").equivalence == "BITWISE"
