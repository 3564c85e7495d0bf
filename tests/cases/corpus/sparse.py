"""Sparse tensors."""

from __future__ import annotations

import torch
from tests.cases.corpus.snippet import Body, snippet
from tests.cases.corpus.sources import COPY, NONZERO, aten

_COUNTED = aten("sparse/cuda/SparseCUDATensor.cu", 90, "this forces device-host synchronization")
_PRODUCT = aten("sparse/cuda/SparseCUDATensorMath.cu", 116, "coalesces the sparse factor")
_SUM = aten("sparse/SparseTensorMath.cpp", 1709, "coalesces what is left")
_BATCH = aten("sparse/cuda/SparseCUDATensorMath.cu", 785, "waits for the device")
_ROWS = aten("TensorConversions.cpp", 1798, "rows counted by a kernel, once it is coalesced")
_PARTS = aten("TensorConversions.cpp", 270, "indices, then values, to the device")
_MERGED = aten("sparse/SparseTensor.cpp", 626, "returned as it is where it is coalesced")


def _adjacency(device: str = "cuda") -> torch.Tensor:
    places = torch.tensor([[0, 1, 2, 0], [1, 2, 0, 1]], device=device)
    return torch.sparse_coo_tensor(places, torch.ones(4, device=device), (3, 3))


@snippet(1, _PRODUCT, _COUNTED, exact=False)
def messages_over_loose_edges() -> Body:
    adjacency, x = _adjacency(), torch.rand(3, 4, device="cuda")
    return lambda: torch.sparse.mm(adjacency, x)


@snippet(0, _MERGED, repairs=messages_over_loose_edges)
def messages_over_merged_edges() -> Body:
    adjacency, x = _adjacency().coalesce(), torch.rand(3, 4, device="cuda")
    return lambda: (torch.sparse.mm(adjacency, x), adjacency @ x)


@snippet(1, _PRODUCT, _COUNTED, exact=False)
def matrix_product_over_loose_edges() -> Body:
    adjacency, x = _adjacency(), torch.rand(3, 4, device="cuda")
    return lambda: adjacency @ x


@snippet(1, _SUM, _COUNTED, exact=False)
def degrees_of_a_sparse_tensor() -> Body:
    adjacency = _adjacency().coalesce()
    return lambda: torch.sparse.sum(adjacency, 1)


@snippet(1, _BATCH)
def sparse_batch_product() -> Body:
    batch = torch.stack([_adjacency(), _adjacency()]).coalesce()
    x = torch.rand(2, 3, 4, device="cuda")
    return lambda: torch.bmm(batch, x)


@snippet(0, _ROWS, _MERGED)
def rows_compressed() -> Body:
    adjacency = _adjacency().coalesce()
    return lambda: adjacency.to_sparse_csr()


@snippet(2, _PARTS, COPY)
def sparse_tensor_moved() -> Body:
    adjacency = _adjacency("cpu")
    return lambda: adjacency.cuda()


@snippet(1, NONZERO)
def dense_tensor_made_sparse() -> Body:
    x = torch.eye(3, device="cuda")
    return lambda: x.to_sparse()
