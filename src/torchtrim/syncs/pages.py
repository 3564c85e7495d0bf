"""Writes the sync table and common idioms as documentation: `python -m torchtrim.syncs.pages
docs/waits.md`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

from torchtrim.syncs.base import REF, Citation, Row, native, pytorch
from torchtrim.syncs.lookup import FAMILIES, ROWS, holds


class Idiom(NamedTuple):
    """A common idiom, the row that it triggers, if any, and how often it synchronizes."""

    what: str
    row: str
    times: str
    citation: Citation


def _free(what: str, citation: Citation, times: str = "no wait") -> Idiom:
    return Idiom(what, "", times, citation)


_PRINTING = "torch/_tensor_str.py"
_MANUAL = "torch/csrc/autograd/FunctionsManual.cpp"
_INDEXING = "aten/src/ATen/TensorIndexing.h"

WAITING = (
    Idiom(
        "`x[t]`, `t` a 0-dim integer tensor on the device, even if `x` is on the host",
        "item",
        "once",
        pytorch(_INDEXING, 507, "a 0-dim index is read and selects"),
    ),
    Idiom(
        "`x[:t]`, `range(t)`, `[0] * t`, `torch.zeros(t)`",
        "item",
        "once for each use",
        pytorch(
            "tools/autograd/templates/python_variable_methods.cpp",
            383,
            "`__index__` reads the value",
        ),
    ),
    Idiom(
        "a tensor passed for a Python number, such as `alpha=t` or `fill_value=t`",
        "item",
        "once",
        pytorch("torch/csrc/utils/python_arg_parser.cpp", 2018, "the parser reads the value"),
    ),
    Idiom(
        "`value in x`",
        "item",
        "once",
        pytorch("torch/_tensor.py", 1282, "reads whether any element is equal"),
    ),
    Idiom(
        'f"{t}", `format(t)` of a 0-dim tensor',
        "item",
        "once",
        pytorch("torch/_tensor.py", 1150, "reads the value"),
    ),
    Idiom(
        "`print(x)` and `repr(x)`",
        "masked-select",
        "for floats once, then an element at a time; the data last, a row at a time",
        pytorch(_PRINTING, 154, "selects the elements that decide the width"),
    ),
    Idiom(
        "`clip_grad_norm_(..., error_if_nonfinite=True)`",
        "item",
        "once",
        pytorch("torch/nn/utils/clip_grad.py", 109, "reads whether the norm is finite"),
    ),
    Idiom(
        "`GradScaler.step(optimizer)`",
        "item",
        "once for each device, whether or not it was unscaled before",
        pytorch("torch/amp/grad_scaler.py", 371, "reads whether any gradient is infinite"),
    ),
    Idiom(
        "`GradScaler.get_scale()`",
        "item",
        "once",
        pytorch("torch/amp/grad_scaler.py", 574, "reads the scale"),
    ),
    Idiom(
        "`Adam` and similar optimizers with a `step` on the device, neither capturable nor fused",
        "item",
        "twice for each parameter; once without `foreach`",
        pytorch("torch/optim/adam.py", 772, "reads the step for each correction"),
    ),
    Idiom(
        "a distribution that checks its arguments, the default",
        "item",
        "once for each parameter with a constraint",
        pytorch("torch/distributions/distribution.py", 76, "reads whether all are valid"),
    ),
    Idiom(
        "`log_prob` of such a distribution",
        "item",
        "once",
        pytorch("torch/distributions/distribution.py", 323, "reads whether the sample is valid"),
    ),
    Idiom(
        "`TransformerEncoder(..., mask=...)` without `is_causal`",
        "item",
        "once in each forward",
        pytorch("torch/nn/modules/transformer.py", 1245, "compares the mask with a causal one"),
    ),
    Idiom(
        "`pack_padded_sequence(..., enforce_sorted=False)`",
        "upload",
        "once",
        pytorch("torch/nn/utils/rnn.py", 319, "the order of the lengths is uploaded"),
    ),
    Idiom(
        "`pad_packed_sequence` of sequences that were not sorted",
        "copy-to-host",
        "once",
        pytorch("torch/nn/utils/rnn.py", 399, "the order is copied back"),
    ),
    Idiom(
        "`torch.save`",
        "copy-to-host",
        "once for each storage",
        pytorch("torch/serialization.py", 1311, "each storage is copied to the host"),
    ),
    Idiom(
        "`AveragedModel.update_parameters` with its counter on the device",
        "item",
        "at least twice",
        pytorch("torch/optim/swa_utils.py", 310, "reads whether it is the first"),
    ),
    Idiom(
        "`one_hot(t)` without `num_classes`",
        "item",
        "once",
        native("Onehot.cpp", 56, "reads the largest class"),
    ),
    Idiom(
        "`cross_entropy` with `label_smoothing`, `weight` and a mean",
        "masked-select",
        "once",
        native("LossNLL.cpp", 612, "selects the targets that are not ignored"),
    ),
    Idiom(
        "`torch.cov` and `corrcoef`",
        "equal",
        "once, and once more for each kind of weights' checks",
        native("Correlation.cpp", 128, "reads whether the divisor is positive"),
    ),
    Idiom(
        "`torch.istft`",
        "equal",
        "once",
        native("SpectralOps.cpp", 1187, "reads whether the windows overlap enough"),
    ),
    Idiom(
        "`torch.combinations`",
        "masked-select",
        "once for each of `r`, before 2.14",
        native("Itertools.cpp", 70, "selects from each grid"),
    ),
    Idiom("the backward of `prod()`", "nonzero", "once", pytorch(_MANUAL, 875, "looks for zeros")),
    Idiom(
        "the backward of `prod(dim)`",
        "item",
        "once",
        pytorch(_MANUAL, 909, "reads the number of zeros"),
    ),
    Idiom(
        "the backward of `cumprod`",
        "item",
        "once",
        native("ReduceOps.cpp", 640, "reads whether any is 0"),
    ),
)

FREE = (
    _free(
        "`x[mask] = 3.0`, `mask` on the device",
        native("TensorAdvancedIndexing.cpp", 975, "becomes `masked_fill_` with a number"),
    ),
    _free(
        "`x[mask]`, `mask` on the host",
        native("IndexingUtils.h", 53, "positions go through pinned memory, not blocking"),
    ),
    _free(
        "`one_hot(t, n)`",
        native("Onehot.cpp", 58, "only the CPU compares with the largest class"),
        "no wait; on the CPU it reads",
    ),
    _free(
        "`nonzero_static`",
        native("cuda/Nonzero.cu", 297, "writes a fixed number of indices, all on the device"),
    ),
    _free(
        "`masked_scatter`",
        native("cuda/IndexKernel.cpp", 79, "a running sum of the mask, on the device"),
        "no wait forward; backward waits",
    ),
    _free("`repeat_interleave(x, 3)`", native("Repeat.cpp", 127, "expands and copies")),
    _free(
        "`torch.where(condition, x, 0.0)`",
        native("TensorCompare.cpp", 661, "the number is filled in on the tensor's device"),
    ),
    _free(
        "`torch.multinomial`",
        native("Distributions.cpp", 599, "checks on the device, and reports later"),
    ),
    _free(
        "`torch.quantile`",
        native("Sorting.cpp", 261, "only the CPU checks `q`"),
        "no wait; on the CPU it reads",
    ),
    _free(
        "`Embedding(max_norm=...)`",
        native("cuda/Embedding.cu", 351, "the number of rows stays on the device"),
    ),
    _free(
        "the backward of `x.max()` and `median()`",
        pytorch(_MANUAL, 1912, "CUDA takes a path without a read"),
        "no wait; on the CPU it reads",
    ),
    _free(
        "`clip_grad_norm_`",
        pytorch("torch/nn/utils/clip_grad.py", 166, "the factor is clamped, not read"),
    ),
    _free(
        "`GradScaler.update()`",
        native("cuda/AmpKernels.cu", 209, "the scale changes on the device"),
    ),
    _free(
        "`torch._assert_async(t)`",
        native("cuda/TensorCompare.cu", 108, "checks on the device, and reports later"),
    ),
    _free(
        "`for row in x`", pytorch("torch/_tensor.py", 1223, "views, created from the shape alone")
    ),
    _free("`x[2:4] = 3.0`", pytorch(_INDEXING, 428, "filled with a number")),
)


VERSIONS = ("2.11", "2.12", "2.13", "2.14", "2.15")

_INTRODUCTION = f"""# Host-device syncs

The host queues work for a CUDA device and goes on. When it needs a value, a shape or memory from the
device, or passes it memory that may change, it blocks until the device has caught up. The table
lists the operators that do so, with the condition and the line of PyTorch. An operator without a row does
not synchronize.

A row's condition is evaluated on the arguments of each call. A tensor's device is known from the run: on an
emulated accelerator it is the device that the script requested. Every linked line was read in PyTorch {REF}.
Nearly all of them are in 2.9.1 too, as the rows' versions say, and in the headers and the Python code of
2.13; compiled code of 2.13 and later was not read but run: tests evaluate each row with 2.13, 2.14 and 2.15.

`TT101` is a value read, `TT102` a shape that depends on data, `TT103` an upload, `TT104` an explicit
synchronization, `TT105` a race, caused by a missing one.
"""

_IDIOMS = """## Idioms that use these operators

| what | row | how often | source |
|---|---|---|---|
"""

_FREE = """## Idioms that do not synchronize

| what | | source |
|---|---|---|
"""

_MATRIX = "## By version of torch\n\n"


def page() -> str:
    """Return the table as Markdown."""
    families = (f"## {name}\n\n" + "\n".join(map(_row, rows)) for name, rows in FAMILIES.items())
    waiting = (_line(_cell(one.what), one.row, one.times, _source(one.citation)) for one in WAITING)
    free = (_line(_cell(one.what), one.times, _source(one.citation)) for one in FREE)
    head = _line("row", "code", *VERSIONS) + "|---|---|" + "---|" * len(VERSIONS) + "\n"
    matrix = (
        _line(row.name, row.code, *("waits" if holds(row, one) else "" for one in VERSIONS))
        for row in ROWS
    )
    tables = (_IDIOMS + "".join(waiting), _FREE + "".join(free), _MATRIX + head + "".join(matrix))
    return "\n".join((_INTRODUCTION, *families, *tables))


def _row(row: Row) -> str:
    operators = ", ".join(f"`{operator}`" for operator in row.operators) or "no operator"
    versions = [f"from {row.since}"] if row.since else []
    versions += [f"before {row.until}"] if row.until else []
    lines = (
        f"### {row.name} ({row.code})\n",
        f"{row.what}.\n",
        f"* **Waits when** {row.when}.",
        f"* **Operators** {operators}.",
        f"* **Versions** {', '.join(versions) or 'all'}.",
        f"* **Source** {'; '.join(map(_source, row.evidence))}.",
        f"* **Instead** {row.advice}",
    )
    return "\n".join(lines) + "\n"


def _source(citation: Citation) -> str:
    name = citation.path.rpartition("/")[2]
    return f"[{name}:{citation.line}]({citation.url}), {citation.note}"


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def main(arguments: list[str]) -> None:
    """Write the page to a file, the only argument."""
    if len(arguments) != 1:
        raise SystemExit("give one file: python -m torchtrim.syncs.pages docs/waits.md")
    Path(arguments[0]).write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
