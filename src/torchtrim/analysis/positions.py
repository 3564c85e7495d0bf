"""Finds relative positions that a profile materialized as tensors of query times key.

The trace goes back from every softmax over scores, through elementwise operators, to the origin of each
addend. A lookup in a learnt table with a number for each pair of tokens is a materialized position. So is a
product with such a lookup of vectors, and one with a lookup for each pair of rows or of columns, as in
decomposed positions. A padding mask does not look up numbers for each pair and a causal mask does not look
up any, so they are not matched.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator
from math import prod
from pathlib import PurePath
from typing import Literal, NamedTuple

from torchtrim.records.operator_names import base_name
from torchtrim.records.profile import Operator, Profile, TensorUse

Form = Literal["bias", "vectors", "decomposed", "values"]

_SOFTMAX = {"aten::_softmax", "aten::_safe_softmax"}
_FUSED = "aten::_scaled_dot_product"
_GATHERS = {
    "aten::index",
    "aten::index_select",
    "aten::embedding",
    "aten::gather",
    "aten::take",
    "aten::_unsafe_index",
}
_PRODUCTS = {"aten::bmm", "aten::mm", "aten::baddbmm"}
_SUMS = {"aten::add", "aten::add_", "aten::sub", "aten::sub_"}
_CARRIES = {
    *_SUMS,
    *("aten::mul", "aten::mul_", "aten::div", "aten::div_", "aten::neg", "aten::sigmoid"),
    *("aten::clone", "aten::copy_", "aten::_to_copy", "aten::masked_fill", "aten::masked_fill_"),
    *("aten::where", "aten::constant_pad_nd", "aten::native_dropout", "aten::cat"),
}
_EMPTY = {"aten::zeros", "aten::empty", "aten::new_zeros", "aten::zeros_like", "aten::empty_like"}
_MOST_TRACED = 400  # Arbitrary: far more operators than one attention has.
_LAYERS = re.compile(
    r"(qkv|proj|[qkvo]|[qkvo]_proj|query|key|value|out_proj)\.(weight|bias)|[qkv]_bias|qkv_bias"
)
_TABLES = (
    re.compile(r"rpe_[qkv]\.(rp_rows\.|rp_cols\.)?lookup_table_(weight|bias)"),
    re.compile(r"(relative_position_bias\.)?relative_position_bias_table"),
    re.compile(r"rel_pos_[hw]"),
    re.compile(r"rel_pos_embed_[kv]\.embeddings_table_[vh]"),
    re.compile(r"relative_attention_bias\.weight"),
)


class Written(NamedTuple):
    """Positions that one attention call materializes.

    `gather` is the operator that indexes the table, `operators` handle only positions, `at` is the softmax or
    the fused attention. `scores` is the shape of the scores. The whole attention, from products with keys to
    products with values, is `first <= i < last`.
    """

    form: Form
    gather: int
    operators: tuple[int, ...]
    at: int
    scores: tuple[int, ...]
    first: int = 0
    last: int = 0


def written_positions(profile: Profile) -> tuple[Written, ...]:
    """Return the materialized positions of a profile, in order."""
    trace = _Trace(profile)
    positions: list[Written] = []
    for at in range(len(profile.operators)):
        if around := list(trace.around(at)):
            first, last = trace.reach(at)
            positions += (
                written._replace(first=min(first, *trace.inside(written)), last=max(last, at + 1))
                for written in around
            )
    return tuple(sorted(positions, key=lambda written: (written.gather, written.at)))


class _Scores(NamedTuple):
    """Sizes to look for at one softmax: pairs of tokens, keys, and all scores."""

    shape: tuple[int, ...]
    pairs: int
    keys: int
    number: int


class _Trace:
    """The writer and the readers of each storage."""

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self._writers: defaultdict[int, list[int]] = defaultdict(list)
        self._readers: defaultdict[int, list[int]] = defaultdict(list)
        for index, op in enumerate(profile.operators):
            read = {use.storage for use in op.inputs}
            for storage in {*op.mutates, *(u.storage for u in op.outputs if u.storage not in read)}:
                self._writers[storage].append(index)
            for storage in read:
                self._readers[storage].append(index)

    def around(self, at: int) -> Iterator[Written]:
        """Return the positions materialized for the softmax or fused attention `at`."""
        op = self._profile.operators[at]
        if op.phase not in ("forward", "recompute") or not op.inputs:
            return
        name = base_name(op.name)
        if name in _SOFTMAX:
            if scores := _scores_of(op.inputs[0].shape):
                yield from self._added(op.inputs[0], at, scores)
                yield from self._values(at, scores)
        elif name.startswith(_FUSED) and len(op.inputs) > 3:
            scores = _scores_of((*op.inputs[0].shape[:-1], op.inputs[1].shape[-2]))
            for use in op.inputs[3:]:
                if scores and _is_float(use) and prod(use.shape) >= scores.pairs:
                    yield from self._added(use, at, scores)

    def reach(self, at: int) -> tuple[int, int]:
        """Return the range from the first product that computes the scores to the last with probabilities."""
        op = self._profile.operators[at]
        if base_name(op.name) not in _SOFTMAX:
            return at, at + 1
        before = (leaf for leaf, _ in self._leaves(op.inputs[0].storage, at))
        after = self._after({use.storage for use in op.outputs}, at)
        products = list(filter(self._is_product, (*before, *after)))
        return min([at, *products]), max([at, *products]) + 1

    def inside(self, written: Written) -> list[int]:
        own = self._profile.module_of(written.at)
        modules = ((i, self._profile.module_of(i)) for i in written.operators)
        return [written.at, *(i for i, path in modules if f"{path}.".startswith(f"{own}."))]

    def _is_product(self, index: int) -> bool:
        return base_name(self._profile.operators[index].name) in _PRODUCTS

    def _added(self, use: TensorUse, at: int, scores: _Scores) -> Iterator[Written]:
        for leaf, path in self._leaves(use.storage, at):
            op = self._profile.operators[leaf]
            indexes = _gathers(op) and _indexed(op)[0] >= scores.pairs
            indexes = indexes and prod(op.outputs[0].shape) >= scores.pairs
            if indexes or self._is_compiled(op, scores):
                yield Written("bias", leaf, (leaf, *path), at, scores.shape)
            elif self._is_product(leaf):
                for form, gather, between in self._of_product(leaf, scores):
                    yield Written(form, gather, (gather, *between, leaf, *path), at, scores.shape)

    def _of_product(
        self, product: int, scores: _Scores
    ) -> Iterator[tuple[Form, int, tuple[int, ...]]]:
        """Return the indexed tables of vectors that a product uses."""
        op = self._profile.operators[product]
        computed = sum(prod(use.shape) for use in op.outputs)
        for use in op.inputs:
            for leaf, path in self._leaves(use.storage, product):
                gather = self._profile.operators[leaf]
                if not _gathers(gather):
                    continue
                number, last = _indexed(gather)
                if number == scores.pairs and prod(gather.outputs[0].shape) > number:
                    yield "vectors", leaf, path
                elif 1 < last < scores.keys and computed * scores.keys == scores.number * last:
                    yield "decomposed", leaf, path

    def _values(self, at: int, scores: _Scores) -> Iterator[Written]:
        """Return products of probabilities with an indexed table of vectors."""
        carries = {use.storage for use in self._profile.operators[at].outputs}
        for reader in self._after(carries, at):
            if self._is_product(reader):
                for form, gather, path in self._of_product(reader, scores):
                    if form == "vectors":
                        yield Written("values", gather, (gather, *path, reader), at, scores.shape)

    def _after(self, carries: set[int], at: int) -> list[int]:
        """Return forward operators that read tensors derived from the probabilities."""
        after: set[int] = set()
        pending = list(carries)
        while pending and len(after) < _MOST_TRACED:
            readers = self._readers[pending.pop()]
            for reader in readers[bisect_left(readers, at + 1) :]:
                op = self._profile.operators[reader]
                if reader in after or op.phase != self._profile.operators[at].phase:
                    continue
                after.add(reader)
                if base_name(op.name) in _CARRIES:
                    pending += {use.storage for use in op.outputs} - carries
                    carries |= {use.storage for use in op.outputs}
        return sorted(after)

    def _leaves(self, storage: int, before: int) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Trace a tensor to its origins. Also return the operators on the way, last first."""
        pending: list[tuple[int, int, tuple[int, ...]]] = [(storage, before, ())]
        seen: set[int] = set()
        while pending and len(seen) < _MOST_TRACED:
            storage, before, path = pending.pop()
            writers = self._writers[storage]
            position = bisect_left(writers, before)
            if not position or (writer := writers[position - 1]) in seen:
                continue
            seen.add(writer)
            op = self._profile.operators[writer]
            if base_name(op.name) not in _CARRIES:
                yield writer, path
                continue
            through = {u.storage for u in op.inputs if _is_float(u)} | set(op.mutates)
            pending += [(source, writer, (*path, writer)) for source in sorted(through)]

    def _is_compiled(self, op: Operator, scores: _Scores) -> bool:
        """Return True for an empty tensor of scores that iRPE's `rpe_index` fills outside the dispatcher."""
        if base_name(op.name) not in _EMPTY or op.outputs[0].shape != scores.shape:
            return False
        places = (self._profile.places[i] for i in (op.place, op.caller) if i >= 0)
        return any(PurePath(place.path).stem == "rpe_index" for place in places)


def _scores_of(shape: tuple[int, ...]) -> _Scores | None:
    if len(shape) < 3 or shape[-2] < 2 or shape[-1] < 2:
        return None
    return _Scores(shape, shape[-1] * shape[-2], shape[-1], prod(shape))


def _is_float(use: TensorUse) -> bool:
    return "float" in use.dtype


def _gathers(op: Operator) -> bool:
    """Return True if an operator looks up numbers in a table by integers."""
    name = base_name(op.name)
    looks_up = name in _GATHERS or name.endswith("rpe_index")
    return looks_up and bool(op.outputs) and _is_float(op.outputs[0]) and any(_ids(op))


def _ids(op: Operator) -> Iterator[TensorUse]:
    return (use for use in op.inputs if use.dtype in ("int64", "int32"))


def _indexed(op: Operator) -> tuple[int, int]:
    """Return the number of indices in the largest index tensor and the size of its last dimension."""
    largest = max(_ids(op), key=lambda use: prod(use.shape))
    return prod(largest.shape), (largest.shape or (1,))[-1]


def modules_of(profile: Profile, positions: Iterable[Written]) -> dict[str, list[Written]]:
    """Group positions by the path of the module that computes the softmax."""
    modules: dict[str, list[Written]] = defaultdict(list)
    for written in positions:
        modules[profile.module_of(written.at)].append(written)
    return dict(modules)


def replaceable(profile: Profile, modules: Iterable[str]) -> list[str]:
    """Return the modules whose parameters are only an attention's layers and position tables of one kind.

    A module with other parameters, such as a learnt temperature, computes another function.
    """
    owned: dict[str, list[str]] = {module: [] for module in modules}
    for storage in profile.storages:
        if storage.kind == "parameter":
            parts = storage.name.split(".")
            for length in range(1, len(parts)):
                if (path := ".".join(parts[:length])) in owned:
                    owned[path].append(".".join(parts[length:]))
    return sorted(module for module, names in owned.items() if _is_known(names))


def _is_known(names: list[str]) -> bool:
    rest = [name for name in names if not _LAYERS.fullmatch(name)]
    known = any(all(table.fullmatch(name) for name in rest) for table in _TABLES)
    return bool(rest) and len(rest) < len(names) and known
