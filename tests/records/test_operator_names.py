"""Roles of operators: one name on every device, and plans of schema 1 that named kernels."""

from pathlib import Path

import pytest

from torchtrim.errors import UnreadableInput
from torchtrim.records.files import load_pins, load_plan, plan_text
from torchtrim.records.operator_names import role_of, with_roles
from torchtrim.records.plan import (
    Plan,
    PlanProof,
    Prediction,
    Sizes,
    Technique,
    digest_of_techniques,
)
from torchtrim.techniques.offload_activations.places import place_of as offload_at
from torchtrim.techniques.replay.places import place_of as replay_at

OF_KERNELS = "LM.0:_scaled_dot_product_flash_attention_for_cpu.0,native_layer_norm.1,addmm.0"
OF_ROLES = "LM.0:scaled_dot_product_attention.0,layer_norm.1,addmm.0"
OFFLOAD = "Net:native_batch_norm.3 until mkldnn_convolution.9 from cudnn_batch_norm.12 at 64"


def plan(*where: str, **pins: tuple[str, ...]) -> Plan:
    return Plan(
        torchtrim="0.1.0",
        script="train.py",
        fingerprint={},
        budget_bytes=1,
        techniques=(Technique(name="replay", where=where),),
        predicted=Prediction(peak_bytes=1, step_seconds=1.0),
        pins=pins,
    )


def test_kernels_that_compute_the_same_have_one_role() -> None:
    norms = ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm")
    assert {role_of(one) for one in norms} == {"batch_norm"}
    assert role_of("mkldnn_rnn_layer") == role_of("_cudnn_rnn")
    assert role_of("gelu") == "gelu"
    assert all(role_of(role_of(one)) == role_of(one) for one in (*norms, "gelu", "convolution"))


def test_kernels_are_renamed_whole_and_after_the_path_alone() -> None:
    assert with_roles(OF_KERNELS) == OF_ROLES
    assert with_roles(OF_ROLES) == OF_ROLES
    assert with_roles("Net._softmax.native_layer_norm") == "Net._softmax.native_layer_norm"
    assert with_roles("*:native_layer_norm.*") == "*:layer_norm.*"
    assert with_roles("Net:my_native_layer_norm.0") == "Net:my_native_layer_norm.0"


def test_places_are_the_same_by_kernel_and_by_role() -> None:
    assert replay_at(OF_KERNELS) == replay_at(OF_ROLES)
    assert str(replay_at(OF_KERNELS)) == OF_ROLES
    found = offload_at(OFFLOAD)
    assert str(found) == "Net:batch_norm.3 until convolution.9 from batch_norm.12"


def test_a_plan_of_schema_1_is_read(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    text = plan_text(plan(OF_KERNELS, keep=("*:_softmax.0",)))
    path.write_text(text.replace("schema_version = 2", "schema_version = 1"))
    assert load_plan(path) == plan(OF_ROLES, keep=("*:softmax.0",))
    assert load_pins(path) == {"keep": ("*:softmax.0",)}
    path.write_text(text.replace("schema_version = 2\n", ""))
    assert load_plan(path).techniques[0].where == (OF_ROLES,)
    assert load_pins(path) == {"keep": ("*:softmax.0",)}


@pytest.mark.parametrize("broken", ["[[techniques]]\nwhere = 3", "pins = 7", "techniques = [1]"])
def test_a_broken_plan_of_schema_1_is_refused(tmp_path: Path, broken: str) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(f"schema_version = 1\n{broken}\n")
    with pytest.raises(UnreadableInput):
        load_plan(path)


def test_a_plan_of_a_later_schema_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(plan_text(plan()).replace("schema_version = 2", "schema_version = 3"))
    with pytest.raises(UnreadableInput, match="schema_version 3, and this torchtrim reads 2"):
        load_plan(path)


def test_what_a_plan_assumes_and_holds_for_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    sizes = Sizes(input="LM.input", dimension=1, least=1, most=512)
    told = Technique(name="replay", where=("LM.0:gelu.0",), assumes=("blocks write no list",))
    whole = Plan(
        torchtrim="0.1.0",
        script="train.py",
        fingerprint={},
        budget_bytes=1,
        techniques=(told,),
        predicted=Prediction(peak_bytes=1, step_seconds=1.0),
        sizes=(sizes,),
        graphs={"step": "3f2a"},
        certified=PlanProof(
            verdict="BITWISE",
            techniques=digest_of_techniques((told,)),
            steps=5,
            inputs=("LM: int64[8, 16]",),
            device="cpu",
        ),
    )
    path.write_text(plan_text(whole))
    read = load_plan(path)
    assert read == whole
    assert read.certified is not None
    assert read.certified.techniques == digest_of_techniques(read.techniques)
