"""A line cuts what torch.compile compiles into two graphs.

## What it does

Reports each line of the project at which torch.compile ended a graph and began another, as seen in a run of
the script with its torch.compile on. The break itself has no price: what it costs is what the two graphs
cannot do together.

## Why is this bad?

What one graph returns and the other takes is written to memory, and saved for backward by both; torch chooses
for each graph alone what it saves, and so does a plan. The line runs in Python in each step, and the
kernels before and after it are not fused. In a block, all this happens once in each block.

## Example

```python
def forward(self, x):
    x = self.attention(x)
    print(x.norm().item())
    return self.mlp(x)
```

## Use instead

```python
def forward(self, x):
    return self.mlp(self.attention(x))
```

Move what Dynamo cannot trace, such as a print, `.item()` or a library in C, out of what is compiled, or
into a `torch.library.custom_op`. `TORCH_LOGS=graph_breaks` names the reason; `fullgraph=True` makes a break
an error.

## Fix safety

One graph may round otherwise than two: `torchtrim verify` tells. A break around a checkpoint that runs two
passes over one block can be wanted.

## References

* [torch.compile: working with graph breaks](https://docs.pytorch.org/docs/stable/compile/programming_model.graph_breaks_index.html)
"""

from __future__ import annotations

from collections.abc import Iterator

from torchtrim.analysis.user_source import CodeLine
from torchtrim.records.finding import Finding
from torchtrim.records.profile import Profile
from torchtrim.rules.base import Rule


def check(profile: Profile) -> Iterator[Finding]:
    """Yield one finding for each line that ends a graph."""
    lines = {(one.path, one.line): one.function for one in profile.compiled if one.broken}
    for (path, line), function in lines.items():
        yield CodeLine(path, line).finding(
            RULE.code,
            f"the graph of `{function}` breaks here: what it saves is chosen for two graphs apart, and "
            "what passes between them is written to memory",
            "move this line out of what is compiled; TORCH_LOGS=graph_breaks names the reason",
        )


RULE = Rule(code="TT404", name="graph-break", check=check)
