import pytest

from profiles import Step, use
from torchtrim.rules.tt101_host_read import check


def one_read(device: str, name: str = "aten::_local_scalar_dense", where: str = "cuda:0") -> Step:
    step = Step(device)
    loss = step.alive("temporary", 4, device=where)
    step.op(name, loss, line=12, seconds=0.005)
    return step


@pytest.mark.parametrize(
    "name",
    ["aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal", "aten::allclose"],
)
def test_a_read_on_a_device_is_found_at_its_line(name: str) -> None:
    (finding,) = check(one_read("cuda:0", name).profile())
    assert (finding.code, finding.path, finding.line) == ("TT101", "train.py", 12)
    assert finding.count_per_step == 1
    assert name in finding.message


def test_a_real_device_measures_the_price() -> None:
    (finding,) = check(one_read("cuda:0").profile())
    assert finding.price_ms == pytest.approx(5)
    assert finding.source == "measured"
    assert "5 ms" in finding.message


def test_an_emulated_device_has_no_price() -> None:
    (finding,) = check(one_read("emulated").profile())
    assert finding.price_ms is None
    assert finding.source != "measured"
    assert " ms" not in finding.message


def test_a_step_on_the_cpu_waits_for_nothing() -> None:
    assert not list(check(one_read("cpu", where="cpu").profile()))


@pytest.mark.parametrize("device", ["cuda:0", "emulated"])
def test_a_tensor_in_the_hosts_memory_waits_for_nothing(device: str) -> None:
    assert not list(check(one_read(device, where="cpu").profile()))


def test_a_comparison_with_one_side_on_the_device_waits() -> None:
    step = Step("cuda:0")
    a, b = step.alive("temporary", 4), step.alive("temporary", 4, device="cpu")
    step.op("aten::equal", b, a)
    assert len(list(check(step.profile()))) == 1


@pytest.mark.parametrize("name", ["aten::add.Tensor", "aten::any", "aten::_local_scalar_dense_x"])
def test_other_operators_do_not_wait(name: str) -> None:
    assert not list(check(one_read("cuda:0", name).profile()))


def test_reads_are_counted_by_line() -> None:
    step = Step("cuda:0")
    loss = step.alive("temporary", 4)
    for line in (3, 4, 3, 3):
        step.op("aten::_local_scalar_dense", loss, line=line, seconds=0.001)
    found = {f.line: f for f in check(step.profile())}
    assert {line: f.count_per_step for line, f in found.items()} == {3: 3, 4: 1}
    assert found[3].price_ms == pytest.approx(3)
    assert "3 times a step" in found[3].message


@pytest.mark.parametrize(("target", "count"), [("cpu", 1), ("cuda:0", 0)])
def test_a_copy_waits_only_if_it_goes_to_the_host(target: str, count: int) -> None:
    step = Step("cuda:0")
    logits = step.alive("temporary", 400)
    step.op("aten::_to_copy", logits, makes=400, device=target)
    assert len(list(check(step.profile()))) == count


def test_a_copy_from_the_host_is_no_read() -> None:
    step = Step("cuda:0")
    batch = step.alive("input", 400, device="cpu")
    step.op("aten::_to_copy", batch, makes=400)
    assert not list(check(step.profile()))


def test_without_a_place_the_script_is_named() -> None:
    step = Step("cuda:0")
    step.op("aten::_local_scalar_dense", step.alive("temporary", 4))
    (finding,) = check(step.profile())
    assert (finding.path, finding.line, finding.end_line) == ("train.py", 0, 0)


def test_a_read_by_the_optimizer_has_its_own_advice() -> None:
    step = Step("cuda:0")
    state = step.alive("optimizer_state", 4)
    step.op("aten::_local_scalar_dense", state, phase="optimizer", line=1)
    step.op("aten::_local_scalar_dense", use(state), line=2)
    first, second = check(step.profile())
    assert first.cure is not None
    assert second.cure is not None
    assert "fused=True" in first.cure.reason
    assert "fused=True" not in second.cure.reason


def test_copies_have_their_own_advice() -> None:
    step = Step("cuda:0")
    logits = step.alive("temporary", 400)
    step.op("aten::_to_copy", logits, makes=400, device="cpu", line=1)
    step.op("aten::_local_scalar_dense", logits, line=2)
    first, second = check(step.profile())
    assert first.cure is not None
    assert second.cure is not None
    assert "copy it once" in first.cure.reason
    assert "copy it once" not in second.cure.reason
