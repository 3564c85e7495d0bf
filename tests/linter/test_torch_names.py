"""The names of torch that inference knows are torch's."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from torchtrim.linter import torch_names as names


def test_methods_are_those_of_a_tensor() -> None:
    methods = names.ONLY_TENSORS | names.NEW | names.PLAIN_METHODS | names.REDUCTIONS
    missing = {name for name in methods if not hasattr(torch.Tensor, name)}
    assert missing <= {"has_names", "argsort_", "bfloat16_", "new_empty_strided"}


def test_what_only_tensors_have_numpy_has_not() -> None:
    assert {name for name in names.ONLY_TENSORS if hasattr(np.ndarray, name)} == set()


def test_functions_layers_and_types_are_torchs() -> None:
    assert {name for name in names.FUNCTIONAL if not hasattr(F, name)} == set()
    assert {name for name in names.LINALG if not hasattr(torch.linalg, name)} == set()
    assert {name for name in names.LAYERS if not hasattr(torch.nn, name)} == set()
    assert {name for name in names.LIKE | names.DTYPES if not hasattr(torch, name)} == set()
