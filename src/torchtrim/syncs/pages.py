"""Writes the sync table and common idioms as documentation: `python -m torchtrim.syncs.pages
docs/waits.md`."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from torchtrim.syncs.base import REF, Evidence, Row, native, pytorch
from torchtrim.syncs.lookup import FAMILIES, ROWS, holds


@dataclass(frozen=True, kw_only=True)
class Idiom:
    """A common idiom. `rows` are the table's rows that it triggers; if empty, it does not synchronize.

    `times` says how often.
    """

    what: str
    rows: tuple[str, ...]
    times: str
    evidence: Evidence


def _meets(what: str, row: str, times: str, path: str, line: int, note: str) -> Idiom:
    return Idiom(what=what, rows=(row,), times=times, evidence=pytorch(path, line, note))


def _free_idiom(what: str, times: str, evidence: Evidence) -> Idiom:
    return Idiom(what=what, rows=(), times=times, evidence=evidence)


_PRINTING = "torch/_tensor_str.py"
_MANUAL = "torch/csrc/autograd/FunctionsManual.cpp"
_INDEXING = "aten/src/ATen/TensorIndexing.h"

WAITING = (
    _meets(
        "`x[t]`, `t` a 0-dim integer tensor of the device, also where `x` is on the host",
        "item",
        "once",
        _INDEXING,
        507,
        "a 0-dim index is read and selects",
    ),
    _meets(
        "`x[:t]`, `range(t)`, `[0] * t`, `torch.zeros(t)`",
        "item",
        "once for each use",
        "tools/autograd/templates/python_variable_methods.cpp",
        383,
        "`__index__` reads the value",
    ),
    _meets(
        "a tensor where a Python number is wanted, such as `alpha=t` or `fill_value=t`",
        "item",
        "once",
        "torch/csrc/utils/python_arg_parser.cpp",
        2018,
        "the parser reads the value",
    ),
    _meets(
        "`value in x`",
        "item",
        "once",
        "torch/_tensor.py",
        1282,
        "reads whether any element is equal",
    ),
    _meets(
        'f"{t}", `format(t)` of a 0-dim tensor',
        "item",
        "once",
        "torch/_tensor.py",
        1150,
        "reads the value",
    ),
    _meets(
        "`print(x)` and `repr(x)`",
        "masked-select",
        "for floats once, then an element at a time; the data last, a row at a time",
        _PRINTING,
        154,
        "selects what decides the width",
    ),
    _meets(
        "`clip_grad_norm_(..., error_if_nonfinite=True)`",
        "item",
        "once",
        "torch/nn/utils/clip_grad.py",
        109,
        "reads whether the norm is finite",
    ),
    _meets(
        "`GradScaler.step(optimizer)`",
        "item",
        "once for each device, whether or not it was unscaled before",
        "torch/amp/grad_scaler.py",
        371,
        "reads whether any gradient is infinite",
    ),
    _meets(
        "`GradScaler.get_scale()`",
        "item",
        "once",
        "torch/amp/grad_scaler.py",
        574,
        "reads the scale",
    ),
    _meets(
        "`Adam` and its kin with a `step` on the device, neither capturable nor fused",
        "item",
        "twice for each parameter; once without `foreach`",
        "torch/optim/adam.py",
        772,
        "reads the step for each correction",
    ),
    _meets(
        "a distribution that checks its arguments, the default",
        "item",
        "once for each parameter with a constraint",
        "torch/distributions/distribution.py",
        76,
        "reads whether all are valid",
    ),
    _meets(
        "`log_prob` of such a distribution",
        "item",
        "once",
        "torch/distributions/distribution.py",
        323,
        "reads whether the sample is valid",
    ),
    _meets(
        "`TransformerEncoder(..., mask=...)` without `is_causal`",
        "item",
        "once in each forward",
        "torch/nn/modules/transformer.py",
        1245,
        "compares the mask with a causal one",
    ),
    _meets(
        "`pack_padded_sequence(..., enforce_sorted=False)`",
        "upload",
        "once",
        "torch/nn/utils/rnn.py",
        319,
        "the order of the lengths is moved",
    ),
    _meets(
        "`pad_packed_sequence` of what was not sorted",
        "copy-to-host",
        "once",
        "torch/nn/utils/rnn.py",
        399,
        "the order is copied back",
    ),
    _meets(
        "`torch.save`",
        "copy-to-host",
        "once for each storage",
        "torch/serialization.py",
        1311,
        "each storage is copied to the host",
    ),
    _meets(
        "`AveragedModel.update_parameters` with its counter on the device",
        "item",
        "twice at least",
        "torch/optim/swa_utils.py",
        310,
        "reads whether it is the first",
    ),
    Idiom(
        what="`one_hot(t)` without `num_classes`",
        rows=("item",),
        times="once",
        evidence=native("Onehot.cpp", 56, "reads the largest class"),
    ),
    Idiom(
        what="`cross_entropy` with `label_smoothing`, `weight` and a mean",
        rows=("masked-select",),
        times="once",
        evidence=native("LossNLL.cpp", 612, "selects the targets that are not ignored"),
    ),
    Idiom(
        what="`torch.cov` and `corrcoef`",
        rows=("equal",),
        times="once, and once more for each kind of weights' checks",
        evidence=native("Correlation.cpp", 128, "reads whether the divisor is positive"),
    ),
    Idiom(
        what="`torch.istft`",
        rows=("equal",),
        times="once",
        evidence=native("SpectralOps.cpp", 1187, "reads whether the windows overlap enough"),
    ),
    Idiom(
        what="`torch.combinations`",
        rows=("masked-select",),
        times="once for each of `r`, before 2.14",
        evidence=native("Itertools.cpp", 70, "selects from each grid"),
    ),
    _meets("the backward of `prod()`", "nonzero", "once", _MANUAL, 875, "looks for zeros"),
    _meets("the backward of `prod(dim)`", "item", "once", _MANUAL, 909, "reads how many are 0"),
    Idiom(
        what="the backward of `cumprod`",
        rows=("item",),
        times="once",
        evidence=native("ReduceOps.cpp", 640, "reads whether any is 0"),
    ),
)

FREE = (
    _free_idiom(
        "`x[mask] = 3.0`, `mask` on the device",
        "no wait",
        native("TensorAdvancedIndexing.cpp", 975, "becomes `masked_fill_` with a number"),
    ),
    _free_idiom(
        "`x[mask]`, `mask` on the host",
        "no wait",
        native("IndexingUtils.h", 53, "positions go through pinned memory, not blocking"),
    ),
    _free_idiom(
        "`one_hot(t, n)`",
        "no wait; on the CPU it reads",
        native("Onehot.cpp", 58, "only the CPU compares with the largest class"),
    ),
    _free_idiom(
        "`nonzero_static`",
        "no wait",
        native("cuda/Nonzero.cu", 297, "writes as many as it is asked for, all on the device"),
    ),
    _free_idiom(
        "`masked_scatter`",
        "no wait forward; backward waits",
        native("cuda/IndexKernel.cpp", 79, "a running sum of the mask, on the device"),
    ),
    _free_idiom(
        "`repeat_interleave(x, 3)`",
        "no wait",
        native("Repeat.cpp", 127, "expands and copies"),
    ),
    _free_idiom(
        "`torch.where(condition, x, 0.0)`",
        "no wait",
        native("TensorCompare.cpp", 661, "the number is filled in on the tensor's device"),
    ),
    _free_idiom(
        "`torch.multinomial`",
        "no wait",
        native("Distributions.cpp", 599, "checks on the device, and reports later"),
    ),
    _free_idiom(
        "`torch.quantile`",
        "no wait; on the CPU it reads",
        native("Sorting.cpp", 261, "only the CPU checks `q`"),
    ),
    _free_idiom(
        "`Embedding(max_norm=...)`",
        "no wait",
        native("cuda/Embedding.cu", 351, "the number of rows stays on the device"),
    ),
    _free_idiom(
        "the backward of `x.max()` and `median()`",
        "no wait; on the CPU it reads",
        pytorch(_MANUAL, 1912, "CUDA takes a way without reading"),
    ),
    _free_idiom(
        "`clip_grad_norm_`",
        "no wait",
        pytorch("torch/nn/utils/clip_grad.py", 166, "the factor is clamped, not looked at"),
    ),
    _free_idiom(
        "`GradScaler.update()`",
        "no wait",
        native("cuda/AmpKernels.cu", 209, "the scale changes on the device"),
    ),
    _free_idiom(
        "`torch._assert_async(t)`",
        "no wait",
        native("cuda/TensorCompare.cu", 108, "checks on the device, and reports later"),
    ),
    _free_idiom(
        "`for row in x`",
        "no wait",
        pytorch("torch/_tensor.py", 1223, "views, made of the shape alone"),
    ),
    _free_idiom(
        "`x[2:4] = 3.0`",
        "no wait",
        pytorch(_INDEXING, 428, "filled with a number"),
    ),
)


VERSIONS = ("2.11", "2.12", "2.13", "2.14", "2.15")

_INTRODUCTION = f"""# Host-device syncs

The host queues work for a CUDA device and goes on. Where it needs a value, a shape or memory from the
device, or gives it memory that may change, it is blocked until the device has caught up. The table
says which operators do that, when, and where it is written. An operator without a row does not wait.

Rows are asked with the arguments of each call. What a tensor's device is comes from the run: on an
emulated accelerator it is the device that the script asked for. Every line linked here was read in
PyTorch {REF}. Nearly all of them stand in 2.9.1 too, as the rows' versions say, and in the headers and the
Python code of 2.13; compiled code of 2.13 and later was not read, but run: each row is asked in tests
with 2.13, 2.14 and 2.15.

`TT101` is a value read, `TT102` a shape that depends on data, `TT103` an upload, `TT104` a call that asks
for a wait, `TT105` a race, which is what a missing wait can be.
"""

_IDIOMS = """## Lines that come down to these rows

| what | row | how often | source |
|---|---|---|---|
"""

_FREE = """## Lines that do not wait

| what | | source |
|---|---|---|
"""

_MATRIX = "## By version of torch\n\n"


def page() -> str:
    """Return the table as Markdown."""
    families = "\n".join(_family(name, rows) for name, rows in FAMILIES.items())
    waiting = _IDIOMS + "".join(map(_waiting, WAITING))
    free = _FREE + "".join(map(_free, FREE))
    return "\n".join((_INTRODUCTION, families, waiting, free, _matrix()))


def write(path: Path) -> None:
    """Write the page."""
    path.write_text(page(), encoding="utf-8")


def _family(name: str, rows: Iterable[Row]) -> str:
    return f"## {name}\n\n" + "\n".join(map(_row, rows))


def _row(row: Row) -> str:
    asked = ", ".join(f"`{operator}`" for operator in row.operators) or "no operator"
    lines = (
        f"### {row.name} ({row.code})\n",
        f"{row.what}.\n",
        f"* **Waits when** {row.when}.",
        f"* **Operators** {asked}.",
        f"* **Versions** {_versions(row)}.",
        f"* **Source** {'; '.join(map(_source, row.evidence))}.",
        f"* **Instead** {row.advice}",
    )
    return "\n".join(lines) + "\n"


def _versions(row: Row) -> str:
    if row.since and row.until:
        return f"from {row.since}, before {row.until}"
    return f"from {row.since}" if row.since else f"before {row.until}" if row.until else "all"


def _source(evidence: Evidence) -> str:
    name = evidence.path.rpartition("/")[2]
    return f"[{name}:{evidence.line}]({evidence.url}), {evidence.note}"


def _waiting(idiom: Idiom) -> str:
    rows = ", ".join(idiom.rows)
    return f"| {_cell(idiom.what)} | {rows} | {idiom.times} | {_source(idiom.evidence)} |\n"


def _free(idiom: Idiom) -> str:
    return f"| {_cell(idiom.what)} | {idiom.times} | {_source(idiom.evidence)} |\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _matrix() -> str:
    head = f"| row | code | {' | '.join(VERSIONS)} |\n|---|---|{'---|' * len(VERSIONS)}\n"
    return _MATRIX + head + "".join(map(_line, ROWS))


def _line(row: Row) -> str:
    marks = " | ".join("waits" if holds(row, version) else "" for version in VERSIONS)
    return f"| {row.name} | {row.code} | {marks} |\n"


def main(arguments: list[str]) -> None:
    """Run the command: one argument, the file."""
    if len(arguments) != 1:
        raise SystemExit("give one file: python -m torchtrim.syncs.pages docs/waits.md")
    write(Path(arguments[0]))


if __name__ == "__main__":
    main(sys.argv[1:])
