"""What can be told of a value."""

from __future__ import annotations

import ast
from functools import reduce

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from torchtrim.linter import torch_names as names
from torchtrim.linter.kinds import (
    ARRAY,
    DTYPE,
    PLAIN,
    UNKNOWN,
    ValueKind,
    annotated,
    device,
    function,
    joined,
    mapping,
    part_of,
    placed,
    places,
    refined,
    sequence,
    singled,
    tensor,
    together,
)

HOST, DEVICE, ANY = tensor("host"), tensor("device"), tensor()


def test_only_a_tensor_that_may_lie_on_a_device_waits() -> None:
    assert [
        kind.waits for kind in (HOST, DEVICE, ANY, tensor("mixed"), PLAIN, device("device"))
    ] == [*(False, True, True, False, False, False)]


def test_where_a_result_lies() -> None:
    assert together(HOST, PLAIN) == "host"
    assert together(HOST, UNKNOWN) == "mixed"
    assert together(HOST, DEVICE) == "device"
    assert together(HOST, ANY) == ""
    assert together(PLAIN, ARRAY) == ""


def test_either_of_two_is_what_both_agree_on() -> None:
    assert joined(HOST, HOST) == HOST
    assert joined(HOST, DEVICE) == ANY
    assert joined(singled(ANY), ANY) == ANY
    assert joined(ANY, PLAIN) == UNKNOWN
    assert joined(sequence(HOST), sequence(DEVICE)) == sequence(ANY)


def test_what_a_part_is() -> None:
    assert part_of(sequence(PLAIN)) == PLAIN
    assert part_of(singled(DEVICE)) == DEVICE
    assert part_of(device("host")) == UNKNOWN


def test_a_tuple_knows_its_places_where_they_differ() -> None:
    pair = places([HOST, PLAIN])
    assert placed(pair, 2) == [HOST, PLAIN]
    assert placed(pair, 3) is None
    assert places([HOST, HOST]) == sequence(HOST)
    assert joined(pair, places([DEVICE, PLAIN])) == places([ANY, PLAIN])
    assert joined(pair, sequence(HOST)) == sequence(UNKNOWN)


def test_code_tells_what_an_annotation_leaves_open() -> None:
    said = tensor(sure=False)
    assert refined(UNKNOWN, HOST) == HOST
    assert refined(said, HOST) == HOST
    assert refined(said, PLAIN) == said
    assert refined(PLAIN, HOST) == PLAIN
    assert refined(places([said, PLAIN]), places([HOST, UNKNOWN])) == places([HOST, PLAIN])
    assert refined(places([said, PLAIN]), sequence(HOST)) == places([said, PLAIN])


def test_one_of_several_functions() -> None:
    either = joined(function("torch.sin"), function("torch.cos"))
    assert [name for name, _ in either.items] == ["torch.sin", "torch.cos"]
    some = joined(either, UNKNOWN)
    assert some == joined(UNKNOWN, either) == joined(some, either) == joined(some, UNKNOWN)
    assert {name for name, _ in some.items} == {"", "torch.sin", "torch.cos"}
    assert joined(either, PLAIN) == UNKNOWN
    assert joined(either, function(gives=HOST)).part == HOST
    many = [function(f"torch.f{n}") for n in range(20)]
    assert len(reduce(joined, many).items) < 20


NAMES = {"Tensor": "torch.Tensor", "torch": "torch", "np": "numpy"}


def dotted(node: ast.AST) -> str | None:
    text = ast.unparse(node)
    head, _, rest = text.partition(".")
    return f"{NAMES[head]}.{rest}".rstrip(".") if head in NAMES else None


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("Tensor", tensor(sure=False)),
        ("torch.Tensor | None", tensor(sure=False)),
        ("Optional[torch.BoolTensor]", tensor("", "bool", sure=False)),
        ("Union[torch.LongTensor, None]", tensor("", "int", sure=False)),
        ("'torch.Tensor'", tensor(sure=False)),
        ("Tensor | float", UNKNOWN),
        ("Union[Tensor, np.ndarray]", UNKNOWN),
        ("'no python ('", UNKNOWN),
        ("int | None", PLAIN),
        ("bool", PLAIN),
        ("dict[str, Tensor]", mapping({}, tensor(sure=False))),
        ("dict", mapping({}, UNKNOWN)),
        ("np.ndarray", ARRAY),
        ("torch.device", device("")),
        ("torch.dtype", DTYPE),
        ("list[Tensor]", sequence(tensor(sure=False))),
        ("tuple[Tensor, ...]", sequence(tensor(sure=False))),
        ("tuple[int, Tensor]", places([PLAIN, tensor(sure=False)])),
        ("Something", UNKNOWN),
        ("None", UNKNOWN),
    ],
)
def test_annotations(text: str, kind: ValueKind) -> None:
    assert annotated(ast.parse(text, mode="eval").body, dotted) == kind


def test_no_annotation_says_nothing() -> None:
    assert annotated(None, dotted) == UNKNOWN


def test_methods_are_those_of_a_tensor() -> None:
    methods = names.ONLY_TENSORS | names.NEW | names.PLAIN_METHODS | names.REDUCTIONS
    missing = {name for name in methods if not hasattr(torch.Tensor, name)}
    assert missing <= {"has_names", "argsort_", "bfloat16_", "new_empty_strided"}


def test_what_only_tensors_have_numpy_has_not() -> None:
    assert {name for name in names.ONLY_TENSORS if hasattr(np.ndarray, name)} == set()


def test_functions_layers_and_types_are_torchs() -> None:
    assert {name for name in names.FUNCTIONAL if not hasattr(F, name)} == set()
    assert {name for name in names.LAYERS if not hasattr(torch.nn, name)} == set()
    assert {name for name in names.LIKE | names.DTYPES if not hasattr(torch, name)} == set()
