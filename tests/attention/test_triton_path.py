"""Triton's kernels equal the reference, in its interpreter."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from torchtrim.attention import ops
from torchtrim.errors import UsageError


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_the_kernels_equal_the_reference_in_the_interpreter() -> None:
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("interpreted.py")],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_a_path_that_is_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ops._INSTALLED, "triton", False)
    with pytest.raises(UsageError, match="needs triton, which is not installed"):
        ops.check("triton")
