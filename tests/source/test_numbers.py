"""Expressions that the source shows to be Python numbers."""

from __future__ import annotations

import pytest

from torchtrim.source.numbers import is_known_number
from torchtrim.source.source import SourceFile

KNOWN = (
    "keep(1.5)",
    "keep(-1)",
    "keep(n)",
    "keep(f)",
    "keep(o)",
    "keep(w)",
    "w = 0.0 if w == 'warn' else w\nkeep(w)",
    "keep(q)",
    "keep(n / 2 if n else -n)",
    "keep(float(a))",
    "keep(a.item() + len(b))",
    "keep(x.shape[0] * x.size(1))",
    "keep(math.sqrt(n))",
    "for k in range(a):\n    keep(k)",
    "t = 0\nfor k in range(3):\n    t += n\n    t = t * 2\nkeep(t)",
    "if isinstance(a, float):\n    keep(a)",
    "if isinstance(a, (int, float)) and b:\n    a = keep(a)",
    "keep(a) if isinstance(a, int | float) else None",
)
OPEN = (
    "keep(a)",
    "keep(self.a)",
    "keep(a * 2)",
    "keep(s)",
    "keep(u)",
    "keep(z)",
    "keep(nothing)",
    "keep(x.shape)",
    "keep(x.shape[:2])",
    "keep(x.size())",
    "keep([n])",
    "keep(None)",
    "keep('1')",
    "n = [n]\nkeep(n)",
    "n = a\nkeep(n)",
    "for k in a:\n    keep(k)",
    "for k, v in enumerate(a):\n    keep(v)",
    "if isinstance(a, float):\n    a = [a]\n    keep(a)",
    "if isinstance(a, float):\n    pass\nelse:\n    keep(a)",
    "if not isinstance(a, float):\n    keep(a)",
    "if isinstance(a, (float, list)):\n    keep(a)",
    "if isinstance(a, float) or b:\n    keep(a)",
    "float = torch.tensor\nkeep(float(a))",
)


def read(body: str) -> bool:
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    head = (
        "def f(self, x, a, b, n: int, f: float, o: float | None, s: str, u: 'int | list', "
        "w: Union[float, Literal['warn', 'nan']], q: 'Optional[Literal[1, 2]]', "
        "z: Union[float, list], nothing: Literal['a', None]):"
    )
    source = SourceFile("case.py", f"import math\nimport torch\n{head}\n{lines}")
    (call,) = source.calls("keep")
    return is_known_number(call.args[0], source)


@pytest.mark.parametrize("body", [*KNOWN, *OPEN])
def test_what_is_known_to_be_a_number(body: str) -> None:
    assert read(body) == (body in KNOWN)
