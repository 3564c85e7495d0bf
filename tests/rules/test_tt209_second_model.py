from __future__ import annotations

import pytest

from keeping import the_only_finding


@pytest.mark.parametrize(
    ("keeps", "what"),
    [("average", "an average of the parameters ("), ("reference", "a model that is not trained (")],
)
def test_a_copy_of_the_model_on_the_device(keeps: str, what: str) -> None:
    assert the_only_finding(keeps, "TT209").message.startswith(what)
