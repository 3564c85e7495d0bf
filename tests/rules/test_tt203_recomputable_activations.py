import pytest
from msgspec.structs import replace

from profiles import Made, Step, training_step
from torchtrim.records.profile import Profile
from torchtrim.rules.tt203_recomputable_activations import check


def test_a_chain_of_blocks() -> None:
    (finding,) = check(training_step(blocks=4, size=1024))
    assert (finding.code, finding.path, finding.line) == ("TT203", "train.py", 10)
    assert finding.count_per_step == 4
    assert finding.price_bytes == 3 * 3 * 1024
    assert finding.message.startswith(
        "4 Block blocks (net.0 to net.3) keep 12.0 KiB of activations at the peak; computing them "
        "again in backward frees about 9.00 KiB, "
    )
    assert "about 8.00 ms more a step" in finding.message


def test_the_cure_is_the_command_for_the_script() -> None:
    (finding,) = check(training_step())
    assert finding.cure is not None
    assert (finding.cure.kind, finding.cure.equivalence) == ("advice", "BITWISE")
    assert "`torchtrim optimize train.py --memory 60%`" in finding.cure.reason


def test_one_block_alone_gains_nothing() -> None:
    assert not list(check(training_step(blocks=1)))


def test_blocks_of_different_types_are_no_repeat() -> None:
    profile = training_step(blocks=2)
    types = iter(("Net", "Encoder", "Decoder"))
    modules = [replace(module, type=next(types)) for module in profile.modules]
    assert not list(check(replace(profile, modules=modules)))


def test_inference_keeps_nothing() -> None:
    profile = training_step()
    calls = [replace(call, graded=False) for call in profile.calls]
    assert not list(check(replace(profile, calls=calls)))


def test_two_roots_of_a_type_are_no_blocks() -> None:
    profile = training_step(blocks=4)
    modules = [replace(module, parent=-1) for module in profile.modules]
    assert not list(check(replace(profile, modules=modules)))


@pytest.mark.parametrize(("always", "count"), [(0, 1), (67_992, 1), (67_993, 0)])
def test_below_a_tenth_of_the_peak_it_is_not_worth_it(always: int, count: int) -> None:
    profile = training_step(blocks=4, size=1000)
    weight = replace(profile.storages[0], bytes=always)
    profile = replace(profile, storages=[weight, *profile.storages[1:]])
    assert len(list(check(profile))) == count


def leaves_that_keep_only_their_outputs() -> Profile:
    step = Step()
    made: list[Made] = []
    with step.module("net"):
        for number in range(4):
            with step.module(f"net.{number}", "Linear") as call:
                made.append(step.op("aten::addmm", makes=1000))
                call.outputs.append(made[-1].out)
    for one in reversed(made):
        step.backward("aten::mm", one, one)
    return step.profile()


def test_modules_that_keep_only_their_outputs_gain_nothing() -> None:
    assert not list(check(leaves_that_keep_only_their_outputs()))


def nested(*, inner_output: bool) -> Profile:
    """Two layers, each of two parts; a part keeps 1000 bytes inside, unless that is its output."""
    step = Step()
    made: list[Made] = []
    with step.module("net"):
        for layer in range(2):
            with step.module(f"net.{layer}", "Layer"):
                for part in range(2):
                    with step.module(f"net.{layer}.{part}", "Part") as call:
                        made.append(step.op("aten::addmm", makes=1000))
                        call.outputs += [made[-1].out] * inner_output
    for one in reversed(made):
        step.backward("aten::mm", one, one)
    return step.profile()


def test_of_nested_types_the_one_that_saves_most_is_reported() -> None:
    (inner,) = check(nested(inner_output=False))
    assert (inner.price_bytes, inner.count_per_step) == (3000, 4)
    assert "Part blocks (net.0.0 to net.1.1)" in inner.message
    (outer,) = check(nested(inner_output=True))
    assert (outer.price_bytes, outer.count_per_step) == (2000, 2)
    assert "Layer blocks (net.0 to net.1)" in outer.message


def test_a_type_inside_itself_counts_once() -> None:
    profile = nested(inner_output=False)
    modules = [replace(m, type="Layer") if m.parent >= 0 else m for m in profile.modules]
    (finding,) = check(replace(profile, modules=modules))
    assert (finding.price_bytes, finding.count_per_step) == (2000, 2)


def test_two_separate_types_are_two_findings() -> None:
    step = Step()
    made: list[Made] = []
    with step.module("net"):
        for kind in ("Encoder", "Decoder"):
            for number in range(2):
                with step.module(f"net.{kind}{number}", kind):
                    made.append(step.op("aten::addmm", makes=1000))
    for one in reversed(made):
        step.backward("aten::mm", one, one)
    found = list(check(step.profile()))
    assert sorted(f.message.split()[1] for f in found) == ["Decoder", "Encoder"]
    assert [f.price_bytes for f in found] == [1000, 1000]


def test_a_step_without_operators() -> None:
    assert not list(check(Step().profile()))


def test_cousins_of_a_type_are_no_repeat() -> None:
    step = Step()
    made: list[Made] = []
    with step.module("net"):
        for branch in ("Left", "Right"):
            with step.module(f"net.{branch}", branch), step.module(f"net.{branch}.a", "Part"):
                made.append(step.op("aten::addmm", makes=1000))
    for one in reversed(made):
        step.backward("aten::mm", one, one)
    assert not list(check(step.profile()))
