"""Rows about waits that torch leaves out while a dispatch mode runs, so whatever runs them reports them.

`BACKWARD` has the rows by the name of the node of autograd whose gradient waits.
"""

from __future__ import annotations

from torchtrim.syncs.asks import no_operator
from torchtrim.syncs.base import Evidence, Row
from torchtrim.syncs.sources import native, pytorch

_MANUAL = "torch/csrc/autograd/FunctionsManual.cpp"


def _hidden(name: str, code: str, what: str, when: str, advice: str, *evidence: Evidence) -> Row:
    return Row(
        name=name,
        code=code,
        what=what,
        when=when,
        operators=(),
        waits=no_operator,
        evidence=evidence,
        advice=advice,
    )


PRODUCT = _hidden(
    "product-backward",
    "TT102",
    "the gradient of `prod()`",
    "in backward, to find which elements are 0",
    "Where none is 0, `x.log().sum().exp()`.",
    pytorch(_MANUAL, 875, "finds the elements that are 0"),
    pytorch(_MANUAL, 909, "reads how many are 0, along a dimension"),
)

CUMULATIVE = _hidden(
    "cumulative-product-backward",
    "TT101",
    "the gradient of `cumprod()`",
    "in backward, to know whether any element is 0",
    "Where none is 0, `x.log().cumsum(dim).exp()`.",
    native("ReduceOps.cpp", 640, "reads whether any element is 0"),
)

SMOOTHED = _hidden(
    "smoothed-weights",
    "TT102",
    "`cross_entropy` with class weights and label smoothing, with `reduction='mean'`",
    "to sum the weights of the targets that are not ignored",
    "`reduction='sum'`, and a division by the sum of `weight[target]` where the target counts.",
    native("LossNLL.cpp", 612, "selects the targets that are not ignored"),
)

SPARSE_SIZE = _hidden(
    "sparse-size",
    "TT102",
    "`torch.sparse_coo_tensor(indices, values)` without a size",
    "the indices are on the device: the largest of each dimension is copied to the host",
    "Give the size.",
    native("sparse/SparseTensor.cpp", 332, "copies the sizes that the indices need to the host"),
)

BACKWARD = {
    "ProdBackward0": PRODUCT,
    "ProdBackward1": PRODUCT,
    "CumprodBackward0": CUMULATIVE,
}
ROWS = (PRODUCT, CUMULATIVE, SMOOTHED, SPARSE_SIZE)
