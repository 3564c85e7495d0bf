"""What newer versions mend."""

from torchtrim.records.trace import TraceSite
from torchtrim.traces.known_fixes import MENDS, mended


def site(path: str, function: str, within: str = "") -> TraceSite:
    return TraceSite(
        path=path,
        function=function,
        line=1,
        op="aten::_local_scalar_dense",
        within=within,
        count=1,
        wait_ms=1.0,
        saves_alone_ms=None,
    )


def test_known_places_are_told_once_with_the_version() -> None:
    path = "diffusers/schedulers/scheduling_flow_match_euler_discrete.py"
    sites = [site(path, "index_for_timestep"), site(path, "index_for_timestep")]
    (note,) = mended(sites, {"diffusers": "0.34.0"})
    assert "diffusers 0.34.0" in note
    assert "set_begin_index" in note
    assert "/pull/11696" in note


def test_operators_and_what_is_unknown() -> None:
    assert "nonzero_static" in mended([site("train.py", "f", "aten::nonzero")], {})[0]
    assert mended([site("train.py", "f"), site("diffusers/x.py", "index_for_timestep")], {}) == []


def test_each_has_a_source() -> None:
    assert all(mend.source.startswith("https://") for mend in MENDS)
    assert all(mend.path or mend.function or mend.within for mend in MENDS)
