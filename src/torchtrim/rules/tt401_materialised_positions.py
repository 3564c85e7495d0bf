"""Attention materializes its relative positions as tensors of query times key.

## What it does

Finds tensors added to the scores of an attention, or multiplied with its probabilities, that come
from a learnt table indexed once for each pair of tokens: a bias of (heads, L, L), lookups of
(batch, heads, L, L), vectors of (L, L, head_dim) on queries, keys or values, and decomposed
positions, whose rows and columns are added up to L x L. It finds them in hand-written attention and
in the `attn_mask` of torch's. Masks (causal, padding), ALiBi and positions added to tokens do not
count. The price in bytes is how far the peak would fall without these tensors, in ms the time of
their operators in forward and backward. Less than 1 % of the step and of the peak is not reported.

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
models `torchtrim plan` replaces the modules without changing the source.

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
from collections.abc import Iterator, Sequence

from torchtrim.analysis.positions import Written, modules_of, replaceable, written_positions
from torchtrim.analysis.timeline import peak_operator, peak_without, timeline
from torchtrim.analysis.user_source import SourceLine, line_of
from torchtrim.core.units import format_bytes
from torchtrim.records.commands import quoted
from torchtrim.records.finding import Finding, Suggestion
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
    lines: dict[SourceLine, list[Written]] = defaultdict(list)
    for one in written_positions(profile):
        lines[line_of(profile, one.gather)].append(one)
    at = peak_operator(profile)
    peak = timeline(profile).high[at] if at >= 0 else 0
    for line, found in lines.items():
        finding = _finding(profile, line, found, peak)
        share = max(_share(finding.price_bytes, peak), _seconds_share(profile, found))
        if share >= _SHARE:
            yield finding


def _share(part: float | None, whole: float) -> float:
    return (part or 0) / whole if whole else 0.0


def _seconds_share(profile: Profile, found: Sequence[Written]) -> float:
    return _share(_seconds(profile, found), profile.step_seconds)


def _with_backward(profile: Profile, found: Sequence[Written]) -> set[int]:
    own = {i for one in found for i in one.operators}
    return own | {i for i, op in enumerate(profile.operators) if op.forward in own}


def _seconds(profile: Profile, found: Sequence[Written]) -> float:
    return sum(profile.operators[i].seconds for i in _with_backward(profile, found))


def _bytes(profile: Profile, found: Sequence[Written], peak: int) -> tuple[int, int]:
    """Return the bytes that the operators allocated in the step, and how far the peak would fall without
    them."""
    operators = _with_backward(profile, found)
    born = [
        number
        for number, storage in enumerate(profile.storages)
        if storage.birth in operators and storage.kind in ("activation", "temporary")
    ]
    made = sum(profile.storages[number].counted for number in born)
    return made, peak - peak_without(profile, born)


def _finding(profile: Profile, line: SourceLine, found: Sequence[Written], peak: int) -> Finding:
    modules = sorted(modules_of(profile, found))
    made, size = _bytes(profile, found, peak)
    pairs = " x ".join(map(str, found[0].scores[-2:]))
    calls = len({one.at for one in found})
    measured = not is_emulated(profile.device)
    return Finding(
        code=RULE.code,
        path=line.path,
        line=line.line,
        end_line=line.line,
        message=f"relative positions are materialized: {_WORDS[found[0].form].format(pairs=pairs)} "
        f"in {calls} attention{'s' * (calls != 1)}{_of(modules)}; a step allocates {format_bytes(made)} "
        f"for that, {format_bytes(size)} of it at the peak",
        count_per_step=len({one.gather for one in found}),
        price_ms=_seconds(profile, found) * 1e3 if measured else None,
        price_bytes=size,
        source="measured" if measured else "modelled",
        fix=_fix(profile, found, modules),
    )


def _of(modules: Sequence[str]) -> str:
    if not any(modules):
        return ""
    return f" ({modules[0]})" if len(modules) == 1 else f" ({modules[0]} to {modules[-1]})"


def _fix(profile: Profile, found: Sequence[Written], modules: Sequence[str]) -> Suggestion:
    known = replaceable(profile, modules)
    change = (
        "call torchtrim.attention.relative_attention, or the adapter for this model beside it, which "
        "does not materialize a tensor of query times key"
    )
    if not known and (types := _types(profile, modules)):
        change = f"{change}; {types} is not among the modules that it replaces"
    if known:
        script = quoted(profile.script or "SCRIPT")
        change = (
            f"the technique relative_attention replaces {len(known)} of {len(modules)} modules: "
            f"`torchtrim plan {script} --memory 60%` chooses it where it helps, and `verify` proves "
            "that the step computes the same"
        )
    return Suggestion(
        kind="advice", equivalence="ROUNDING", reason=f"{change}. {_measure(found[0])}"
    )


def _types(profile: Profile, modules: Sequence[str]) -> str:
    """Return the classes of these modules."""
    types = {module.path: module.type for module in profile.modules}
    return ", ".join(dict.fromkeys(types[path] for path in modules if path in types))


def _measure(one: Written) -> str:
    """Return the call that measures, on this shape, options that change the function."""
    *leading, queries, _ = one.scores
    batch, heads = (leading[0], leading[-1]) if len(leading) > 1 else (1, leading[0])
    return (
        f"torchtrim.attention.advise({batch}, {heads}, tokens={queries}) measures what pooling, fewer "
        "buckets or fewer encodings would save on this shape"
    )


RULE = Rule(code="TT401", name="positions-written-out", check=check)
