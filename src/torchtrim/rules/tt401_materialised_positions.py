"""Attention materializes its relative positions as tensors of query times key.

## What it does

Finds tensors added to the scores of an attention, or multiplied with its probabilities, that come
from a learnt table indexed once for each pair of tokens: a bias of (heads, L, L), lookups of
(batch, heads, L, L), vectors of (L, L, head_dim) on queries, keys or values, and decomposed
positions, whose rows and columns are added up to L x L. It finds them in hand-written attention and
in the `attn_mask` of torch's. Masks (causal, padding), ALiBi and positions added to tokens do not
count. The price in bytes is the fall of the peak without these tensors, in ms the time of their
operators in forward and backward. Less than 1 % of the step and of the peak is not reported.

## Why is this bad?

A pair's position depends on a distance, and there are few of these: 49 for a 14 x 14 image with
38416 pairs. Materializing copies each number of a table to all its pairs, in every layer, and
autograd keeps the copies. The gradient adds all pairs up again, into few places, which is the
slowest case for `index`. Vectors on values are worst: (heads, L, L, head_dim) for every layer.

## Example

```python
scores = q @ k.transpose(-2, -1)
scores = scores + self.table[self.index.view(-1)].view(length, length, -1).permute(2, 0, 1)
out = scores.softmax(-1) @ v
```

## Use instead

```python
from torchtrim.attention import window_bias_attention

out = window_bias_attention(q, k, v, self.table, height=height, width=width)
```

`relative_attention` is the general form, with positions on queries, keys and values; the other
adapters of `torchtrim.attention` are for decomposed positions, AutoFormer's and T5's. In known
models `torchtrim optimize` replaces the modules without changing the source.

## Fix safety

The same function: the order of sums differs, hence `ROUNDING`. `state_dict` keeps its keys. Dropout
of probabilities draws other numbers, so a module with dropout is not replaced. The options that
`torchtrim.attention.advise` measures (pooling, fewer buckets, positions on fewer of q, k and v) are
another function, and need new training.

## References

* [Wu et al., Rethinking and Improving Relative Position Encoding for Vision Transformer](https://arxiv.org/abs/2107.14222)
* [torch.nn.functional.scaled_dot_product_attention](https://pytorch.org/docs/stable/generated/torch.nn.functional.scaled_dot_product_attention.html)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence

from torchtrim.analysis.positions import Written, modules_of, replaceable, written_positions
from torchtrim.analysis.timeline import peak_without, timeline
from torchtrim.analysis.user_source import CodeLine, line_of
from torchtrim.core.units import format_bytes
from torchtrim.records.commands import fitting
from torchtrim.records.finding import Finding
from torchtrim.records.profile import Profile, is_emulated
from torchtrim.rules.base import Rule

_SHARE = 0.01  # Arbitrary; as the documentation says.
_WORDS = {
    "bias": "a bias or lookup of {pairs} numbers",
    "vectors": "vectors for {pairs} pairs",
    "decomposed": "rows and columns added up to {pairs} numbers",
    "values": "vectors on values for {pairs} pairs",
}


def check(profile: Profile) -> Iterator[Finding]:
    """Yield one finding for each line that indexes a table for every pair."""
    lines: dict[CodeLine, list[Written]] = defaultdict(list)
    for written in written_positions(profile):
        lines[line_of(profile, written.gather)].append(written)
    peak = max(timeline(profile).high, default=0)
    for line, positions in lines.items():
        own = {i for written in positions for i in written.operators}
        operators = own | {i for i, op in enumerate(profile.operators) if op.forward in own}
        finding = _finding(profile, line, positions, operators, peak)
        seconds = sum(profile.operators[i].seconds for i in operators)
        if _is_much(finding.price_bytes or 0, peak) or _is_much(seconds, profile.step_seconds):
            yield finding


def _is_much(part: float, total: float) -> bool:
    return total > 0 and part / total >= _SHARE


def _finding(
    profile: Profile,
    line: CodeLine,
    positions: Sequence[Written],
    operators: Collection[int],
    peak: int,
) -> Finding:
    modules = sorted(modules_of(profile, positions))
    born = [
        number
        for number, storage in enumerate(profile.storages)
        if storage.birth in operators and storage.kind in ("activation", "temporary")
    ]
    allocated = sum(profile.storages[number].counted for number in born)
    saved = peak - peak_without(profile, born)
    pairs = " x ".join(map(str, positions[0].scores[-2:]))
    calls = len({written.at for written in positions})
    where = " to ".join(dict.fromkeys((modules[0], modules[-1])))
    seconds = sum(profile.operators[i].seconds for i in operators)
    measured = not is_emulated(profile.device)
    return line.finding(
        RULE.code,
        f"relative positions are materialized: {_WORDS[positions[0].form].format(pairs=pairs)} "
        f"in {calls} attention{'s' * (calls != 1)}{f' ({where})' if any(modules) else ''}; "
        f"a step allocates {format_bytes(allocated)} for that, {format_bytes(saved)} of it at the peak",
        f"{_change(profile, modules)}. {_measure(positions[0])}",
        equivalence="ROUNDING",
        count_per_step=len({written.gather for written in positions}),
        price_ms=seconds * 1e3 if measured else None,
        price_bytes=saved,
        source="measured" if measured else "modelled",
    )


def _change(profile: Profile, modules: Sequence[str]) -> str:
    if known := replaceable(profile, modules):
        plan = fitting("--allow", "rounding", script=profile.script or "SCRIPT")
        return (
            f"the technique relative_attention replaces {len(known)} of {len(modules)} modules: "
            f"`{plan}` chooses it where it helps, and compares every result"
        )
    change = (
        "call torchtrim.attention.relative_attention, or the adapter for this model beside it, which "
        "does not materialize a tensor of query times key"
    )
    by_path = {module.path: module.type for module in profile.modules}
    types = ", ".join(dict.fromkeys(by_path[path] for path in modules if path in by_path))
    return f"{change}; {types} is not among the modules that it replaces" if types else change


def _measure(written: Written) -> str:
    """Return the call that measures, on this shape, options that change the function."""
    *leading, queries, _ = written.scores
    batch, heads = (leading[0], leading[-1]) if len(leading) > 1 else (1, leading[0])
    return (
        f"torchtrim.attention.advise({batch}, {heads}, tokens={queries}) measures the savings of pooling, "
        "fewer buckets or fewer encodings on this shape"
    )


RULE = Rule(code="TT401", name="positions-written-out", check=check)
