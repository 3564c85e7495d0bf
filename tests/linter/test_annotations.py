"""What an annotation says that a value is."""

from __future__ import annotations

import ast

import pytest

from torchtrim.linter.annotations import annotated
from torchtrim.linter.kinds import (
    ARRAY,
    DTYPE,
    PLAIN,
    UNKNOWN,
    Kind,
    device,
    mapping,
    places,
    sequence,
    tensor,
)

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
def test_annotations(text: str, kind: Kind) -> None:
    assert annotated(ast.parse(text, mode="eval").body, dotted) == kind


def test_no_annotation_says_nothing() -> None:
    assert annotated(None, dotted) == UNKNOWN
